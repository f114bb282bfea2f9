"""Wrong gradients in a sentence: a few hypotheses, tested on the numbers of the rank that is furthest off.

1. Find the tensors of each rank that are not the mean over the ranks, within rounding.
2. Take the last such rank. Lay its wrong elements side by side, and next to them every rank's own and the mean.
3. Try one hypothesis after another: its own, a multiple of the mean, another rank's, the step before, a weighted sum.
   The first that leaves nothing over names the mistake.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

CLOSE, NEAR = 3e-5, 3e-6  # what a hypothesis may leave over of a gradient; rounding, relative to the largest element
_ROUNDED = 1e-2
Gradients = Mapping[str, torch.Tensor | None]
Kind = tuple[str, dict[str, Any]]
WORDS = {
    "sum": "rank {rank}'s gradient is the sum over {n} ranks, not their average: divide by n, the number of ranks",
    "twice": "rank {rank}'s gradient is the average divided by n a second time, so off by 1/{n}: divide only once",
    "scaled": "rank {rank}'s gradient is {factor:.4g} times the average: divided by the wrong number? by {divisor:.3g} "
    "on {n} ranks",
    "local": "rank {rank} keeps its own gradient, not the average: put your result into the gradient itself (in place, "
    "with gradient.copy_(...) or gradient /= n); a new tensor with the same name changes nothing outside",
    "not sent back": "only rank {right} has the average, and rank {rank} still has its own gradient: the gradients "
    "were gathered or reduced there, and the average was not sent back",
    "broadcast": "rank {rank} has a copy of rank {other}'s own gradient, not the average: it was sent, but not added "
    "up",
    "divided alone": "rank {rank} has its own gradient times {factor:.4g}: it was divided, but never added to the "
    "others'",
    "zero": "rank {rank}'s gradient is zero instead of the average",
    "stale": "rank {rank} has the average of the step before: each step must average its own gradients",
    "left out": "rank {other}'s gradient is not in the average",
    "weighted": "rank {rank} has a sum of the ranks' gradients, but with wrong weights: {weights}",
    "largest": "rank {rank} has the largest of the ranks' gradients instead of their mean: the operation is not the "
    "sum",
    "rounded": "rank {rank}'s gradient is rounded (a relative error of {error:.0e}): sent in a shorter dtype?",
    "not finite": "rank {rank} has infinities or NaN instead of the average",
    "missing": "a gradient is missing on rank {rank}: .grad is None instead of the average",
    "filled": "a parameter that no rank used gets a gradient on rank {rank}, instead of None",
    "shape": "rank {rank}'s gradient has another shape",
    "unknown": "rank {rank}'s gradients are wrong: they are not the mean over ranks, and no known mistake explains "
    "them",
}


def mean_of(own: Sequence[Gradients]) -> dict[str, torch.Tensor | None]:
    """The mean over ranks, of which those without a gradient count as zero; None where none has one."""
    found: dict[str, torch.Tensor | None] = {}
    for name in own[0]:
        there = [gradient for each in own if (gradient := each[name]) is not None]
        found[name] = torch.stack(there).sum(dim=0) / len(own) if there else None
    return found


def is_wrong(
    found: torch.Tensor | None, right: torch.Tensor | None, own: Sequence[torch.Tensor | None], near: float = NEAR
) -> bool:
    """Whether a gradient is not the right one, within what the order of additions may change: `near`, relative to the
    largest element of any rank."""
    if found is None or right is None:
        return found is not right
    scale = max((each.abs().max().item() for each in own if each is not None and each.numel()), default=0.0)
    return found.shape != right.shape or not bool(((found - right).abs() <= near * scale).all())


def explain(
    found: Sequence[Gradients],
    own: Sequence[Gradients],
    before: Gradients | None = None,
    words: Mapping[str, str] | None = None,
    near: float = NEAR,
) -> tuple[int, str, str] | None:
    """A rank, what is wrong with its gradients, and a number expected and found; None if all are the mean over ranks.

    found, own: by rank. before: the averages of the step before. words: sentences in place of those in WORDS.
    near: as in `is_wrong`.
    """
    n, right = len(found), mean_of(own)
    wrong = [[name for name in right if is_wrong(each[name], right[name], [g[name] for g in own], near)] for each in found]
    bad = [rank for rank, names in enumerate(wrong) if names]
    if not bad:
        return None
    kinds = {rank: _kind(found[rank], own, right, before, rank, wrong[rank]) for rank in bad}
    rank = bad[-1]
    kind, values = kinds[rank]
    if len(bad) == n - 1 and {name for name, _ in kinds.values()} == {"local"}:
        kind, values = "not sent back", {"right": next(r for r in range(n) if r not in bad)}
    text = {**WORDS, **(words or {})}[kind].format(rank=rank, n=n, **values)
    return rank, text + _where(wrong[rank], found[rank], right, n), _numbers(found[rank], right, wrong[rank], rank, n)


def _kind(
    found: Gradients,
    own: Sequence[Gradients],
    right: Gradients,
    before: Gradients | None,
    rank: int,
    names: Sequence[str],
) -> Kind:
    """The first hypothesis that explains the wrong elements of these tensors, and the values of its sentence."""
    off: dict[str, torch.Tensor] = {}
    for name in names:
        mine, mean = found[name], right[name]
        if mine is None or mean is None:
            return ("filled" if mean is None else "missing"), {}
        if mine.shape != mean.shape:
            return "shape", {}
        off[name] = (mine != mean).flatten()

    def flat(some: Gradients) -> torch.Tensor:
        parts = []
        for name, places in off.items():
            tensor = some[name]
            parts.append(torch.zeros(int(places.sum())) if tensor is None else tensor.flatten()[places])
        return torch.cat([part.double() for part in parts])

    got, mean, each = flat(found), flat(right), [flat(gradients) for gradients in own]
    if not got.isfinite().all():
        return "not finite", {}
    if not got.any():
        return "zero", {}

    def holds(what: torch.Tensor, within: float = CLOSE) -> bool:
        return bool((got - what).norm() <= within * got.norm())

    last = None if before is None else flat(before)
    return _simple(got, mean, each, rank, holds) or _combined(got, mean, each, last, holds)


def _simple(got: torch.Tensor, mean: torch.Tensor, each: Sequence[torch.Tensor], rank: int, holds: Any) -> Kind | None:
    """A multiple of the mean, or of one rank's gradient; None if it is neither."""
    n = len(each)
    if holds(each[rank]):
        return "local", {}
    factor = (got @ mean / (mean @ mean)).item()
    if holds(factor * mean):
        kind = "sum" if abs(factor / n - 1) < 1e-3 else "twice" if abs(factor * n - 1) < 1e-3 else "scaled"
        return kind, {"factor": factor, "divisor": n / factor}
    for other, gradient in enumerate(each):
        if holds(gradient):
            return "broadcast", {"other": other}
    factor = (got @ each[rank] / (each[rank] @ each[rank])).item()
    return ("divided alone", {"factor": factor}) if holds(factor * each[rank]) else None


def _combined(
    got: torch.Tensor, mean: torch.Tensor, each: Sequence[torch.Tensor], before: torch.Tensor | None, holds: Any
) -> Kind:
    """The step before, another operation than the sum, or a sum with wrong weights."""
    n = len(each)
    if before is not None and holds(before):
        return "stale", {}
    if holds(torch.stack([*each]).amax(dim=0)):
        return "largest", {}
    basis = torch.stack([*each], dim=1)
    weights = torch.linalg.lstsq(basis, got.unsqueeze(1)).solution.flatten()
    if len(got) > 2 * n and holds(basis @ weights):
        absent = [rank for rank in range(n) if abs(weights[rank]) < 1e-3 / n]
        told = ", ".join(f"{weight:.3g} of rank {rank}'s" for rank, weight in enumerate(weights.tolist()))
        return ("left out", {"other": absent[0]}) if len(absent) == 1 else ("weighted", {"weights": told})
    if holds(mean, _ROUNDED):
        return "rounded", {"error": ((got - mean).norm() / mean.norm()).item()}
    return "unknown", {}


def _where(names: Sequence[str], found: Gradients, right: Gradients, n: int) -> str:
    """Which tensors, or elements of the longest wrong one, are wrong; "" if all are."""
    sizes = {name: 0 if (tensor := right[name]) is None else tensor.numel() for name in names}
    longest = max(names, key=lambda name: sizes[name])
    mine, mean = found[longest], right[longest]
    parts = []
    if mine is not None and mean is not None and mine.shape == mean.shape:
        off = (mine - mean).abs().flatten() > NEAR * mean.abs().max()
        places, total = off.nonzero().flatten(), off.numel()
        if 0 < len(places) < 0.9 * total and total > 8:
            first, last = int(places[0]), int(places[-1])
            rest = f", the remainder of {total} divided by {n}" if total - first == total % n else ""
            parts.append(f"{len(places)} of {total} elements of {longest}, from {first} to {last}{rest}")
    if len(names) < sum(each is not None for each in right.values()):
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        parts.append(f"wrong on {', '.join(names[:4])}{more}")
    return f" ({'; '.join(parts)})" if parts else ""


def _numbers(found: Gradients, right: Gradients, names: Sequence[str], rank: int, n: int) -> str:
    """One number expected and one found."""
    worst = names[-1]
    mine, mean = found[worst], right[worst]
    if mine is None or mean is None or mine.shape != mean.shape:
        return f"in {worst} on rank {rank} of {n}"
    place = int((mine - mean).abs().flatten().nan_to_num(float("inf")).argmax())
    expected, got = mean.flatten()[place], mine.flatten()[place]
    return f"expected {expected:.6g}, got {got:.6g} in element {place} of {worst} on rank {rank} of {n}"
