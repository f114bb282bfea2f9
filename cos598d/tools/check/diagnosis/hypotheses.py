"""What the wrong elements of one rank's gradients are: a few hypotheses, tested on the numbers."""

from collections.abc import Sequence

import torch

from cos598d.tools.check.comparison import Comparison, Gradients
from cos598d.tools.check.diagnosis.symptom import HALF, MIXED, NOT_ZEROED, OF_HOLDERS, STALE, UNKNOWN, Symptom

# The relative residual if a hypothesis holds; rounding leaves less, a wrong hypothesis much more.
CLOSE = 3e-5
MOST_ELEMENTS = 3_000  # of a tensor, spread evenly


def symptom_on_rank(comparison: Comparison, before: Comparison | None, rank: int) -> Symptom:  # noqa: C901
    """What the wrong elements of this rank's wrong tensors are."""
    size = len(comparison.found)
    names = comparison.wrong[rank]
    pick = _WrongElements(comparison, rank, names)
    found, right = pick(comparison.found[rank]), pick(comparison.right)
    own = [pick(each) for each in comparison.local.ranks]
    if not torch.isfinite(right).all():
        return Symptom("made finite", size)
    if not torch.isfinite(found).all():
        return Symptom("not finite", size)
    if not found.any():
        return Symptom("zero", size)

    kinds = {tensor.dtype for name in names if (tensor := comparison.found[rank][name]) is not None}
    close = max([CLOSE, *(8 * torch.finfo(kind).eps for kind in kinds)])

    def holds(what: torch.Tensor) -> bool:
        return bool((found - what).norm() <= close * found.norm())

    if holds(right):
        return Symptom("nearly", size, {"error": ((found - right).norm() / right.norm()).item()})
    factor = (found @ right / (right @ right)).item()
    if _is_divided_by_holders(comparison, rank):
        return Symptom(OF_HOLDERS, size, {"factor": factor})
    if holds(own[rank]):
        return Symptom("local", size)
    if holds(factor * right):
        return Symptom("scaled", size, {"factor": factor})
    most = found.abs().max().item()
    if len(found) > 1 and (found.abs() == most).all() and (found * right > 0).all() and (right.abs() > most).all():
        return Symptom("cut off", size, {"most": most})
    if torch.equal(found, found.round()):
        return Symptom("integers", size)
    if rounded := _rounding(found, right, size):
        return rounded
    # it may be rounded as well, but the factor is the larger mistake
    if factor and _rounding(found / factor, right, size):
        return Symptom("scaled", size, {"factor": factor})
    for other, gradient in enumerate(own):
        if holds(gradient):
            return Symptom("broadcast", size, {"rank": other})
    factor = (found @ own[rank] / (own[rank] @ own[rank])).item()
    if holds(factor * own[rank]):
        return Symptom("divided alone", size, {"factor": factor})
    return (
        _of_parts(comparison, pick, found, rank)
        or _of_steps(comparison, before, pick, found, rank)
        or _of_ranks(comparison, own, found)
        or _of_elements(own, found)
        or Symptom(UNKNOWN, size)
    )


def _is_divided_by_holders(comparison: Comparison, rank: int) -> bool:
    """Whether each wrong tensor is the sum divided by the number of ranks that have a nonzero gradient."""
    size, counts = len(comparison.found), []
    for name in comparison.wrong[rank]:
        gradients = [own[name] for own in comparison.local.ranks]
        counts.append(sum(each is not None and bool(each.any()) for each in gradients))
        found, right = comparison.pair(rank, name)
        if not counts[-1] or (found * counts[-1] - right * size).norm() > CLOSE * size * right.norm():
            return False
    return min(counts) < size


def _rounding(found: torch.Tensor, right: torch.Tensor, size: int) -> Symptom | None:
    """Whether it is right except for coarse rounding: relative, or in equal steps as in an integer."""
    large = right.abs() > 0.02 * right.abs().max()
    error, values = (found - right)[large], right[large].abs()
    relative = error / values

    def size_of(part: torch.Tensor) -> float:
        return part.square().mean().sqrt().item() if len(part) else 0.0

    below = values <= values.median()
    if size_of(relative) > max(HALF.values()) or not below.any() or below.all():
        return None
    if size_of(relative[below]) > 2.5 * size_of(relative[~below]):
        return Symptom("steps", size, {"step": 2 * error.abs().max().item()})
    name = next(name for name, most in HALF.items() if size_of(relative) < most)
    return Symptom(name, size, {"error": size_of(relative)})


class _WrongElements:
    """Selects the elements of gradients that are wrong on a rank, some of each tensor, as one vector."""

    def __init__(self, comparison: Comparison, rank: int, names: Sequence[str]):
        self._places: dict[str, torch.Tensor] = {}
        for name in names:
            found, right = comparison.found[rank][name], comparison.right[name]
            if found is None or right is None:
                continue
            places = comparison.off(rank, name).nonzero().flatten()
            self._places[name] = places[:: -(-len(places) // MOST_ELEMENTS) or 1]

    def __call__(self, gradients: Gradients) -> torch.Tensor:
        """Those elements of `gradients`, with zeros where one is None: float64, (elements,)."""
        return torch.cat([_elements_of(gradients[name], places) for name, places in self._places.items()])


def _elements_of(gradient: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return torch.zeros(len(places), dtype=torch.float64)
    return gradient.detach().flatten()[places].double()


def _weights(found: torch.Tensor, vectors: Sequence[torch.Tensor]) -> list[float] | None:
    """The weights with which `vectors` add up to `found`; None if there are none, or several, or non-finite ones."""
    basis = torch.stack(list(vectors), dim=1)
    if len(found) < 2 * len(vectors) or not torch.isfinite(basis).all():  # LAPACK refuses infinities
        return None
    scale = basis.norm(dim=0)
    if not (scale > 0).all():
        return None
    solved = torch.linalg.lstsq(basis / scale, found.unsqueeze(1), driver="gelsd")
    if int(solved.rank) < len(vectors):
        return None
    weights = solved.solution.flatten() / scale
    return weights.tolist() if (basis @ weights - found).norm() <= CLOSE * found.norm() else None


def _are(weights: Sequence[float], expected: Sequence[float]) -> bool:
    return all(abs(a - b) < 1e-3 for a, b in zip(weights, expected, strict=True))


def _of_parts(comparison: Comparison, pick: _WrongElements, found: torch.Tensor, rank: int) -> Symptom | None:
    """For a step of two micro-batches: what happened to each."""
    size, parts = len(comparison.found), comparison.local.parts
    if len(parts) != 2:
        return None
    means = [torch.stack([pick(each) for each in part]).mean(dim=0) for part in parts]
    kinds: dict[str, tuple[int, ...]]
    if size == 1:
        weights = _weights(found, means)
        kinds = {"first part lost": (0, 1), "second part lost": (1, 0)}
    else:
        weights = _weights(found, [means[0], pick(parts[0][rank]), means[1], pick(parts[1][rank])])
        kinds = {
            "first part lost": (0, 0, 1, 0),
            "second part lost": (1, 0, 0, 0),
            "second part local": (1, 0, 0, 1),
            "second part late": (1, 0, size, 0),
            "first part local": (0, 1, 1, 0),
        }
    return next((Symptom(kind, size) for kind, each in kinds.items() if weights and _are(weights, each)), None)


def _of_steps(
    comparison: Comparison, before: Comparison | None, pick: _WrongElements, found: torch.Tensor, rank: int
) -> Symptom | None:
    """Whether it contains a part of the previous step."""
    size = len(comparison.found)
    if before is None or any(before.found[rank][name] is None for name in comparison.wrong[rank]):
        return None
    for last in (pick(before.right), pick(before.found[rank])):
        weights = _weights(found, [pick(comparison.right), last])
        if weights is None:
            continue
        new, old = weights
        if _are(weights, (0, 1)):
            return Symptom(STALE, size)
        if _are(weights, (1, 1)):
            return Symptom(NOT_ZEROED, size)
        if abs(old) > 1e-3:
            return Symptom(MIXED, size, {"new": round(new, 3), "old": round(old, 3)})
    return None


def _of_elements(own: Sequence[torch.Tensor], found: torch.Tensor) -> Symptom | None:
    """Whether each element is computed from the ranks' own in another way than by a sum."""
    every = torch.stack(list(own))
    most = found.abs().max().item()
    made = {
        "largest": every.amax(dim=0),
        "smallest": every.amin(dim=0),
        "clamped": every.clamp(-most, most).mean(dim=0),
    }
    for kind, each in made.items():
        if (found - each).norm() <= CLOSE * found.norm():
            return Symptom(kind, len(own), {"most": most})
    return None


def _of_ranks(comparison: Comparison, own: Sequence[torch.Tensor], found: torch.Tensor) -> Symptom | None:
    """The weight of each rank's gradient in it."""
    size = len(own)
    weights = _weights(found, own) if size > 1 else None
    if weights is None:
        return None
    norms = [
        torch.stack([g.double().norm() for g in ranks.values() if g is not None]).norm().item()
        for ranks in comparison.local.ranks
    ]
    absent = [rank for rank, weight in enumerate(weights) if abs(weight) < 1e-3 / size]
    if len(absent) == 1:
        return Symptom("left out", size, {"rank": absent[0]})
    clipped = [size * weight * norm for weight, norm in zip(weights, norms, strict=True)]
    if max(clipped) - min(clipped) < 1e-3 * max(clipped) and max(weights) < 1 / size:
        return Symptom("clipped", size, {"norm": clipped[0]})
    most = max(range(size), key=lambda rank: abs(weights[rank]))
    return Symptom("weighted", size, {"rank": most, "weight": weights[most]})
