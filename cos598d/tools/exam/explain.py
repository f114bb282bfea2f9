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
MOST_ELEMENTS = 3_000  # of a tensor, spread evenly: enough to tell one hypothesis from another
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
    "clipped": "the gradients were clipped to a norm of {norm:.3g} before the average: clip after it, all ranks alike",
    "mixed": "rank {rank}'s gradients are wrong: mixed with earlier steps: {new:.3g} of this step's average and "
    "{old:.3g} of the last one's",
    "of holders": "rank {rank}'s gradient is the sum divided by the number of ranks whose gradient is there and not "
    "zero: divide by n, since the others count as zero",
    "not finite": "rank {rank} has infinities or NaN instead of the average",
    "misplaced": "rank {rank} has the averages in the wrong gradients: ranks match calls only by their order, so make "
    "them in one order on all ranks",
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
    wrong = [
        [name for name in right if is_wrong(each[name], right[name], [g[name] for g in own], near)] for each in found
    ]
    bad = [rank for rank, names in enumerate(wrong) if names]
    if not bad:
        return None
    kinds = {rank: _kind(found[rank], own, right, before, rank, wrong[rank]) for rank in bad}
    rank = next((each for each in reversed(bad) if kinds[each][0] == "broadcast"), bad[-1])  # its root keeps its own
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
        places = (mine != mean).flatten().nonzero().flatten()
        off[name] = places[:: -(-len(places) // MOST_ELEMENTS) or 1]

    def flat(some: Gradients) -> torch.Tensor:
        parts = []
        for name, places in off.items():
            tensor = some[name]
            mean = right[name]
            assert mean is not None
            none = mean.new_zeros(len(places))
            parts.append(none if tensor is None else tensor.flatten()[places])
        return torch.cat([_real(part).double() for part in parts])

    n = len(own)
    got, mean, each = flat(found), flat(right), [flat(gradients) for gradients in own]
    if not got.isfinite().all():
        return "not finite", {}
    if not got.any():
        return "zero", {}

    def holds(what: torch.Tensor, within: float = CLOSE) -> bool:
        return bool((got - what).norm() <= within * got.norm())

    if _is_of_holders(found, own, right, names):
        return "of holders", {}
    last = None if before is None or any(before[name] is None for name in names) else flat(before)
    norms = [_norm(gradients) for gradients in own]
    return (
        _simple(got, mean, each, rank, holds)
        or _of_steps(got, mean, last, holds)
        or (("largest", {}) if holds(torch.stack(each).amax(dim=0)) else None)
        or _misplaced(found, right, names)
        or _of_ranks(got, each, norms, holds)
        or _rounded(got, mean, n, holds)
    )


def _rounded(got: torch.Tensor, mean: torch.Tensor, n: int, holds: Any) -> Kind:
    """The mean, or a multiple of it, in fewer bits. Of two mistakes the factor is the larger one."""
    if holds(mean, _ROUNDED):
        return "rounded", {"error": ((got - mean).norm() / mean.norm()).item()}
    factor = (got @ mean / (mean @ mean)).item()
    if holds(factor * mean, _ROUNDED) and factor:
        return _scaled(factor, n)
    return "unknown", {}


def _scaled(factor: float, n: int) -> Kind:
    kind = "sum" if abs(factor / n - 1) < 1e-3 else "twice" if abs(factor * n - 1) < 1e-3 else "scaled"
    return kind, {"factor": factor, "divisor": n / factor}


def _misplaced(found: Gradients, right: Gradients, names: Sequence[str]) -> Kind | None:
    """Whether each wrong tensor has the average of another one, or of several ranks' different ones."""
    for name in names:
        mine = found[name]
        others = [mean for other, mean in right.items() if other != name and mean is not None and mine is not None]
        same = [mean for mean in others if mine is not None and mean.shape == mine.shape and mean.dtype == mine.dtype]
        if mine is None or not any((mine - mean).norm() <= CLOSE * mean.norm() for mean in same):
            return None
    return "misplaced", {}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real and imaginary parts, any other one as it is."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def _norm(gradients: Gradients) -> float:
    return sum(float(_real(each).double().norm()) ** 2 for each in gradients.values() if each is not None) ** 0.5


def _is_of_holders(found: Gradients, own: Sequence[Gradients], right: Gradients, names: Sequence[str]) -> bool:
    """Whether each wrong tensor is the sum divided by the number of ranks that have a nonzero gradient."""
    n = len(own)
    counts = []
    for name in names:
        mine, mean = found[name], right[name]
        assert mine is not None
        assert mean is not None
        have = [gradient for each in own if (gradient := each[name]) is not None and bool(gradient.any())]
        counts.append(len(have))
        got, whole = _real(mine).double() * len(have), _real(mean).double() * n
        if not have or (got - whole).norm() > CLOSE * whole.norm():
            return False
    return max(counts) < n


def _simple(got: torch.Tensor, mean: torch.Tensor, each: Sequence[torch.Tensor], rank: int, holds: Any) -> Kind | None:
    """A multiple of the mean, or of one rank's gradient; None if it is neither."""
    n = len(each)
    if holds(each[rank]):
        return "local", {}
    factor = (got @ mean / (mean @ mean)).item()
    if holds(factor * mean):
        return _scaled(factor, n)
    for other, gradient in enumerate(each):
        if holds(gradient):
            return "broadcast", {"other": other}
    factor = (got @ each[rank] / (each[rank] @ each[rank])).item()
    return ("divided alone", {"factor": factor}) if holds(factor * each[rank]) else None


def _weights(got: torch.Tensor, vectors: Sequence[torch.Tensor], holds: Any) -> list[float] | None:
    """The weights with which the vectors add up to what was found; None if they do not."""
    basis = torch.stack([*vectors], dim=1)
    if len(got) <= 2 * len(vectors) or not bool(basis.isfinite().all()):
        return None
    scale = basis.norm(dim=0).clamp(min=1e-300)
    weights = torch.linalg.lstsq(basis / scale, got.unsqueeze(1)).solution.flatten() / scale
    return weights.tolist() if holds(basis @ weights) else None


def _of_steps(got: torch.Tensor, mean: torch.Tensor, last: torch.Tensor | None, holds: Any) -> Kind | None:
    """The average of the step before, or a mixture with it."""
    if last is None:
        return None
    if holds(last):
        return "stale", {}
    weights = _weights(got, [mean, last], holds)
    if weights is None or abs(weights[1]) < 1e-3:
        return None
    return "mixed", {"new": round(weights[0], 3), "old": weights[1]}


def _of_ranks(got: torch.Tensor, each: Sequence[torch.Tensor], norms: Sequence[float], holds: Any) -> Kind | None:
    """A sum of the ranks' gradients with wrong weights. norms: of each rank's whole gradient."""
    n = len(each)
    weights = _weights(got, each, holds)
    if weights is None:
        return None
    absent = [rank for rank, weight in enumerate(weights) if abs(weight) < 1e-3 / n]
    if len(absent) == 1:
        return "left out", {"other": absent[0]}
    clipped = [n * weight * norm for weight, norm in zip(weights, norms, strict=True)]
    if max(clipped) - min(clipped) < 1e-3 * max(clipped) and max(weights) < 1 / n:
        return "clipped", {"norm": clipped[0]}
    told = ", ".join(f"{round(weight, 6) + 0.0:.3g} of rank {rank}'s" for rank, weight in enumerate(weights))
    return "weighted", {"weights": told}


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
    worst = next((name for name in names if found[name] is None or right[name] is None), names[-1])
    mine, mean = found[worst], right[worst]
    if mine is None or mean is None or mine.shape != mean.shape:
        return f"in {worst} on rank {rank} of {n}"
    place = int((mine - mean).abs().flatten().nan_to_num(float("inf")).argmax())
    expected, got = mean.flatten()[place], mine.flatten()[place]
    return f"expected {expected:.6g}, got {got:.6g} in element {place} of {worst} on rank {rank} of {n}"
