"""From gradients that are not the mean to what probably made them so: a few hypotheses, tried on the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cos598d.check.places import elements_of, steps_of, tensors_of
from cos598d.check.trial import Comparison, agrees

# What is left, relative, when a hypothesis holds; rounding leaves less, another hypothesis much more.
CLOSE = 3e-5
MOST_ELEMENTS = 3_000  # of a tensor, spread evenly
# And the largest relative error that it makes in the mean (root of the mean square), in a few roundings.
HALF = {"half precision (fp16)": 8e-4, "half precision (bf16)": 8e-3}
STEP_WORDS = ("the last step's gradient again", "a running mean over steps", "what the last step left, added on top")


@dataclass(frozen=True)
class Sign:
    """What one world's numbers show: `kind` of mistake, with numbers by which `sentence` can tell kinds apart."""

    kind: str
    size: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    where: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Equal for the same mistake."""
        return self.kind, self.where


def sign_of(comparisons: Sequence[Comparison]) -> Sign | None:
    """What the comparisons of one claim on one world show; None where all is right."""
    wrong = [each for each in comparisons if any(each.wrong)]
    if not wrong:
        return None
    size = len(wrong[0].found)
    signs = []
    for run in dict.fromkeys(each.run for each in wrong):
        for each in [each for each in wrong if each.run == run][:4]:
            before = next((b for b in comparisons if b.run == run and b.step == each.step - 1), None)
            signs.append((_content(each, before), each))
    sign, which = _plainest(signs)
    parts = [elements_of(which), tensors_of(which), steps_of(comparisons)]
    if sign.kind in ("missing", "filled", "shifted", "not sent back"):
        parts = []
    if sign.kind in HALF or sign.kind == "steps":
        parts = parts[1:]
    return Sign(sign.kind, size, sign.numbers, "; ".join(part for part in parts if part))


def _plainest(signs: Sequence[tuple[Sign, Comparison]]) -> tuple[Sign, Comparison]:
    """Of the signs of several moments the one that tells most."""
    for sign, which in signs:
        # In its first step a running mean looks like a wrong divisor; so does clipping where the ranks' norms are near.
        if sign.kind in STEP_WORDS or sign.kind == "clipped":
            return sign, which
    factors = [sign.numbers["factor"] for sign, _ in signs if sign.kind == "scaled"]
    if factors and max(factors) - min(factors) > 1e-3 * max(factors):
        return Sign("rescaled", signs[0][0].size, {"least": min(factors), "most": max(factors)}), signs[0][1]
    return next((pair for pair in signs if pair[0].kind != "unknown"), signs[0])


def sentence(signs: Sequence[Sign]) -> str:
    """What probably made the mistake of which these are the signs, of one kind, at several world sizes."""
    kind, numbers = signs[0].kind, signs[0].numbers
    words = KINDS.get(kind, kind)
    if kind == "scaled":
        words = _divisor([(sign.size, sign.numbers["factor"]) for sign in signs])
    where = signs[0].where
    return words.format(**numbers) + (f" ({where})" if where else "")


KINDS = {
    "local": "never averaged: every rank keeps its own gradient (what was averaged, if anything, is not in .grad)",
    "not sent back": "only rank {right:.0f} has the mean, the others keep their own gradient: gathered or reduced, "
    "and not sent back",
    "broadcast": "every rank has rank {rank:.0f}'s gradient: sent to all, not averaged",
    "divided alone": "every rank has its own gradient times {factor:.4g}: divided, and never summed over the ranks",
    "zero": "zeros stand where the mean belongs: never written, or rounded to whole numbers on the way",
    "integers": "whole numbers stand where the mean belongs: rounded on the way",
    "steps": "rounded to steps of about {step:.1g} on the way: whole numbers, or another fixed-point form",
    "not finite": "infinities or NaN stand where the mean belongs",
    "rescaled": "scaled after the average, by a factor that changes ({least:.3g} to {most:.3g}): clipped?",
    "left out": "rank {rank:.0f}'s gradient is not in the average",
    "neighbours": "each rank averages the gradients of some ranks only, and not of the same ones",
    "largest": "the largest of the ranks' gradients stands where their mean belongs: the operation is not the sum",
    "smallest": "the smallest of the ranks' gradients stands where their mean belongs: the operation is not the sum",
    "clamped": "each rank's gradient is clamped to {most:.3g} element by element before the average",
    "agreed": "every rank has the same values, but not the mean: sent by a rank that does not hold it?",
    "clipped": "each rank's gradient is clipped to a norm of {norm:.3g} before the average; the loop clips, after it",
    "weighted": "a sum of the ranks' gradients, but with wrong weights: most of rank {rank:.0f}'s, {weight:.3g} of it",
    "first part lost": "the gradient of the step's first backward is lost",
    "second part local": "the second backward of a step is not averaged: its gradient stays each rank's own",
    "second part late": "the second backward of a step is not averaged: it is added to what was divided by n before",
    "first part local": "the first backward's gradient stays each rank's own: only the last part is averaged",
    "second part lost": "the gradient of the step's second backward is lost",
    "misplaced": "the right values in the wrong places: the ranks do not lay their gradients side by side in one order",
    "shifted": "right before a parameter that only some ranks used, and shifted after it: each tensor is averaged with "
    "another one, since the ranks' lists of gradients do not match where one of them has None",
    "missing": "a rank that did not use a parameter, while others did, is left without the average",
    "left without": "a gradient is gone: .grad is None where the average belongs",
    "filled": "a parameter that no rank used gets a gradient, where None belongs",
    "unknown": "the gradients are not the mean over ranks, and the numbers do not say why",
    STEP_WORDS[0]: "stale: each step has the average of the step before",
    STEP_WORDS[
        1
    ]: "mixed with earlier steps: {new:.3g} of this step's average and {old:.3g} of what stood there before",
    STEP_WORDS[2]: "the last step's average is still there when this step's is added: a buffer that is not zeroed",
} | {name: f"{name} on the way: off by a relative {{error:.0e}} in the mean" for name in HALF}


def _divisor(pairs: Sequence[tuple[int, float]]) -> str:
    """In words what the mean was multiplied by, from pairs of world size and factor."""

    def fits(rule) -> bool:
        return all(abs(factor - rule(n)) < 1e-3 * rule(n) for n, factor in pairs)

    if fits(lambda n: n):
        return "summed and not averaged: off by exactly n, the number of ranks"
    n, factor = pairs[-1]
    divisor = n / factor
    nearest = round(divisor)
    if len(pairs) > 1 and fits(lambda n: n / nearest if nearest else 0.0):
        return f"divided by the wrong number: by {nearest} on any number of ranks, where n belongs"
    if fits(lambda n: 1 / n):
        return "divided by n twice: off by exactly 1/n"
    if fits(lambda n: n / max(n - 1, 1)):
        return "divided by the wrong number: by n - 1, where n belongs"
    if fits(lambda n: n / (n + 1)):
        return "divided by the wrong number: by n + 1, where n belongs"
    if fits(lambda n: factor):
        return f"off by a factor of {factor:.4g} on any number of ranks: scaled after the average"
    if nearest and abs(divisor - nearest) < 1e-3 * nearest:
        return f"divided by the wrong number: by {nearest} on {n} ranks"
    return f"off by a factor of {factor:.4g} on {n} ranks: scaled, or clipped before finish returns"


def _content(comparison: Comparison, before: Comparison | None) -> Sign:
    size = len(comparison.found)
    if _is_shifted(comparison):
        return Sign("shifted", size)
    missing = _missing(comparison)
    if missing:
        return Sign(missing, size)
    signs = [_on_rank(comparison, before, rank) for rank, names in enumerate(comparison.wrong) if names]
    kinds = {sign.kind for sign in signs}
    right = [rank for rank, names in enumerate(comparison.wrong) if not names]
    if kinds == {"local"} and len(right) == 1:
        return Sign("not sent back", size, {"right": right[0]})
    if kinds == {"local", "broadcast"}:
        return next(sign for sign in signs if sign.kind == "broadcast")
    if kinds == {"left out"} and len({sign.numbers["rank"] for sign in signs}) > 1:
        return Sign("neighbours", size)
    if "unknown" in kinds and _is_misplaced(comparison):
        return Sign("misplaced", size)
    if kinds == {"unknown"} and not right and size > 1 and _is_agreed(comparison):
        return Sign("agreed", size)
    # Where ranks differ, the plainest word is the one that most of them have.
    return max(signs, key=lambda sign: (sum(sign.kind == other.kind for other in signs), sign.kind != "unknown"))


def _missing(comparison: Comparison) -> str:
    for rank, names in enumerate(comparison.wrong):
        for name in names:
            if comparison.right[name] is None:
                return "filled"
            if comparison.found[rank][name] is None:
                return "missing" if comparison.local.ranks[rank][name] is None else "left without"
    return ""


def _is_shifted(comparison: Comparison) -> bool:
    """Whether all is right before a parameter that only some ranks used, in one direction, and wrong after it."""
    present = [{name for name, g in ranks.items() if g is not None} for ranks in comparison.local.ranks]
    odd = set.union(*present) - set.intersection(*present)
    names = [name for name, right in comparison.right.items() if right is not None]
    wrong = set().union(*comparison.wrong)
    places = [i for i, name in enumerate(names) if name in odd]
    bad, good = ([i for i, name in enumerate(names) if (name in wrong) == is_wrong] for is_wrong in (True, False))
    if not places or not bad or not good:
        return False
    forward = max(good) < places[0] <= min(bad) and max(bad) > places[-1]
    backward = min(good) > places[-1] >= max(bad) and min(bad) < places[0]
    return forward or backward


def _is_agreed(comparison: Comparison) -> bool:
    first, *others = comparison.found
    return all(
        agrees(other[name], tensor, comparison.scale(name)) for other in others for name, tensor in first.items()
    )


def _is_misplaced(comparison: Comparison) -> bool:
    def total(gradients: Mapping[str, torch.Tensor | None]) -> float:
        return sum(g.double().sum().item() for g in gradients.values() if g is not None)

    size = sum(g.double().abs().sum().item() for g in comparison.right.values() if g is not None)
    return all(abs(total(found) - total(comparison.right)) < 1e-6 * size for found in comparison.found)


def _on_rank(comparison: Comparison, before: Comparison | None, rank: int) -> Sign:  # noqa: C901
    """What the wrong elements of this rank's wrong tensors are."""
    size = len(comparison.found)
    names = comparison.wrong[rank]
    pick = _Picked(comparison, rank, names)
    found, right = pick(comparison.found[rank]), pick(comparison.right)
    own = [pick(each) for each in comparison.local.ranks]
    if not torch.isfinite(found).all():
        return Sign("not finite", size)
    if not found.any():
        return Sign("zero", size)

    def holds(what: torch.Tensor) -> bool:
        return bool((found - what).norm() <= CLOSE * found.norm())

    if holds(own[rank]):
        return Sign("local", size)
    factor = (found @ right / (right @ right)).item()
    if holds(factor * right):
        return Sign("scaled", size, {"factor": factor})
    if torch.equal(found, found.round()):
        return Sign("integers", size)
    if rounded := _rounding(found, right, size):
        return rounded
    for other, gradient in enumerate(own):
        if holds(gradient):
            return Sign("broadcast", size, {"rank": other})
    factor = (found @ own[rank] / (own[rank] @ own[rank])).item()
    if holds(factor * own[rank]):
        return Sign("divided alone", size, {"factor": factor})
    return (
        _of_parts(comparison, pick, found, rank)
        or _of_steps(comparison, before, pick, found, rank)
        or _of_ranks(comparison, own, found)
        or _of_elements(own, found)
        or Sign("unknown", size)
    )


def _rounding(found: torch.Tensor, right: torch.Tensor, size: int) -> Sign | None:
    """Whether it is right but for coarse rounding: relative, as a short float's, or in equal steps, as an integer's."""
    large = right.abs() > 0.02 * right.abs().max()
    error, values = (found - right)[large], right[large].abs()
    relative = error / values

    def size_of(part: torch.Tensor) -> float:
        return part.square().mean().sqrt().item() if len(part) else 0.0

    below = values <= values.median()
    if size_of(relative) > max(HALF.values()) or not below.any() or below.all():
        return None
    if size_of(relative[below]) > 2.5 * size_of(relative[~below]):
        return Sign("steps", size, {"step": 2 * error.abs().max().item()})
    name = next(name for name, most in HALF.items() if size_of(relative) < most)
    return Sign(name, size, {"error": size_of(relative)})


class _Picked:
    """Takes from gradients the elements that are wrong on a rank, some of each tensor, as one vector."""

    def __init__(self, comparison: Comparison, rank: int, names: Sequence[str]):
        self._places = {}
        for name in names:
            off = (comparison.found[rank][name] - comparison.right[name]).abs().flatten()
            places = (~(off <= CLOSE / 10 * comparison.scale(name))).nonzero().flatten()
            self._places[name] = places[:: -(-len(places) // MOST_ELEMENTS) or 1]

    def __call__(self, gradients: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        return torch.cat(
            [
                torch.zeros(len(places), dtype=torch.float64)
                if gradients[name] is None
                else gradients[name].detach().flatten()[places].double()
                for name, places in self._places.items()
            ]
        )


def _weights(found: torch.Tensor, vectors: Sequence[torch.Tensor]) -> list[float] | None:
    """The weights with which `vectors` make up `found`; None where they do not, or not in one way."""
    basis = torch.stack(vectors, dim=1)
    if len(found) < 2 * len(vectors):
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


def _of_parts(comparison: Comparison, pick: _Picked, found: torch.Tensor, rank: int) -> Sign | None:
    """A step of two micro-batches: what became of each."""
    size, parts = len(comparison.found), comparison.local.parts
    if len(parts) != 2:
        return None
    means = [sum(pick(each) for each in part) / size for part in parts]
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
    return next((Sign(kind, size) for kind, each in kinds.items() if weights and _are(weights, each)), None)


def _of_steps(
    comparison: Comparison, before: Comparison | None, pick: _Picked, found: torch.Tensor, rank: int
) -> Sign | None:
    """Whether something of the step before is in it."""
    size = len(comparison.found)
    if before is None or any(before.found[rank][name] is None for name in comparison.wrong[rank]):
        return None
    for last in (pick(before.right), pick(before.found[rank])):
        weights = _weights(found, [pick(comparison.right), last])
        if weights is None:
            continue
        new, old = weights
        if _are(weights, (0, 1)):
            return Sign(STEP_WORDS[0], size)
        if _are(weights, (1, 1)):
            return Sign(STEP_WORDS[2], size)
        if abs(old) > 1e-3:
            return Sign(STEP_WORDS[1], size, {"new": round(new, 3), "old": round(old, 3)})
    return None


def _of_elements(own: Sequence[torch.Tensor], found: torch.Tensor) -> Sign | None:
    """Whether each element is made of the ranks' own in another way than by a sum."""
    every = torch.stack(list(own))
    most = found.abs().max().item()
    made = {
        "largest": every.amax(dim=0),
        "smallest": every.amin(dim=0),
        "clamped": every.clamp(-most, most).mean(dim=0),
    }
    for kind, each in made.items():
        if (found - each).norm() <= CLOSE * found.norm():
            return Sign(kind, len(own), {"most": most})
    return None


def _of_ranks(comparison: Comparison, own: Sequence[torch.Tensor], found: torch.Tensor) -> Sign | None:
    """With which weight each rank's gradient is in it."""
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
        return Sign("left out", size, {"rank": absent[0]})
    clipped = [size * weight * norm for weight, norm in zip(weights, norms, strict=True)]
    if max(clipped) - min(clipped) < 1e-3 * max(clipped) and max(weights) < 1 / size:
        return Sign("clipped", size, {"norm": clipped[0]})
    most = max(range(size), key=lambda rank: abs(weights[rank]))
    return Sign("weighted", size, {"rank": most, "weight": weights[most]})
