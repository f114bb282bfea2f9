"""What wrong gradients look like, by kind, and the sentence for each kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Each with the largest relative error that a few such roundings cause in the mean (root mean square).
HALF = {"half precision (fp16)": 8e-4, "half precision (bf16)": 8e-3}
STALE, MIXED, NOT_ZEROED = STEP_KINDS = ("stale", "mixed with earlier steps", "not zeroed")
UNKNOWN = "unknown"
OF_HOLDERS = "divided by holders"


@dataclass(frozen=True)
class Symptom:
    """What one world's gradients show: the kind of mistake, the numbers for its sentence, and where it is wrong."""

    kind: str
    world_size: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    where: str = ""


def sentence(symptoms: Sequence[Symptom]) -> str:
    """The probable mistake behind these symptoms, of one kind, at several world sizes."""
    kind, numbers = symptoms[0].kind, symptoms[0].numbers
    words = KINDS.get(kind, kind)
    if kind == "scaled":
        words = _divisor([(each.world_size, each.numbers["factor"]) for each in symptoms])
    where = symptoms[0].where
    return words.format(**numbers) + (f" ({where})" if where else "")


KINDS = {
    "local": "never averaged: every rank keeps its own gradient (what was averaged, if anything, is not in .grad)",
    "not sent back": "only rank {right:.0f} has the mean, the others keep their own gradient: gathered or reduced, "
    "but not sent back",
    "broadcast": "every rank has rank {rank:.0f}'s gradient: sent to all, not averaged",
    "divided alone": "every rank has its own gradient times {factor:.4g}: divided, but never summed over the ranks",
    "zero": "zeros instead of the mean: never written, or rounded to whole numbers on the way",
    "integers": "whole numbers instead of the mean: rounded on the way",
    "steps": "rounded to steps of about {step:.1g} on the way: whole numbers, or another fixed-point form",
    "not finite": "infinities or NaN instead of the mean",
    "nearly": "a relative error of {error:.0e}, more than the rounding of its dtype: sent in a shorter dtype, or "
    "drifting",
    "made finite": "if a rank's gradient is infinite or NaN, a number arrives instead, so an overflow is not seen",
    "rescaled": "scaled after the average, by a factor that changes ({least:.3g} to {most:.3g}): clipped?",
    "left out": "rank {rank:.0f}'s gradient is not in the average",
    "neighbours": "each rank averages the gradients of only some ranks, and not of the same ones",
    "largest": "the largest of the ranks' gradients instead of their mean: the operation is not the sum",
    "smallest": "the smallest of the ranks' gradients instead of their mean: the operation is not the sum",
    "clamped": "each rank's gradient is clamped to {most:.3g} element by element before the average",
    "cut off": "values above {most:.3g} are cut to it after the average: clamped",
    OF_HOLDERS: "divided by the number of ranks whose gradient is there and not zero, instead of by n",
    "agreed": "every rank has the same values, but not the mean: compressed on the way, or sent by a rank without it?",
    "clipped": "each rank's gradient is clipped to a norm of {norm:.3g} before the average; the loop clips, after it",
    "weighted": "a sum of the ranks' gradients, but with wrong weights: most of rank {rank:.0f}'s, {weight:.3g} of it",
    "first part lost": "the gradient of the step's first backward is lost",
    "second part local": "the second backward of a step is not averaged: its gradient stays each rank's own",
    "second part late": "the second backward of a step is not averaged: it is added to what was divided by n before",
    "first part local": "the first backward's gradient stays each rank's own: only the last part is averaged",
    "second part lost": "the gradient of the step's second backward is lost",
    "misplaced": "the right values in the wrong places: the ranks do not put their gradients together in one order",
    "shifted": "right before a parameter that only some ranks used, and shifted after it: each tensor is averaged with "
    "another one, since the ranks' lists of gradients do not match if one of them has None",
    "missing": "a rank that did not use a parameter, while others did, has no average of it",
    "left without": "a gradient is missing: .grad is None instead of the average",
    "filled": "a parameter that no rank used gets a gradient, instead of None",
    UNKNOWN: "the gradients are not the mean over ranks, and no known mistake explains them",
    STALE: "stale: each step has the average of the step before",
    MIXED: "mixed with earlier steps: {new:.3g} of this step's average and {old:.3g} of what was there before",
    NOT_ZEROED: "the last step's average is still there when this step's is added: a buffer that is not zeroed",
} | {name: f"{name} on the way: a relative error of {{error:.0e}} in the mean" for name in HALF}


def _divisor(pairs: Sequence[tuple[int, float]]) -> str:
    """A phrase for the factor of the mean, from pairs of world size and factor."""

    def fits(rule: Callable[[int], float]) -> bool:
        return all(abs(factor - rule(n)) < 1e-3 * rule(n) for n, factor in pairs)

    if fits(lambda n: n):
        return "summed and not averaged: off by exactly n, the number of ranks"
    n, factor = pairs[-1]
    divisor = n / factor
    nearest = round(divisor)
    if len(pairs) > 1 and fits(lambda n: n / nearest if nearest else 0.0):
        return f"divided by the wrong number: by {nearest} on any number of ranks, instead of by n"
    if fits(lambda n: 1 / n):
        return "divided by n twice: off by exactly 1/n"
    if fits(lambda n: n / max(n - 1, 1)):
        return "divided by the wrong number: by n - 1, instead of by n"
    if fits(lambda n: n / (n + 1)):
        return "divided by the wrong number: by n + 1, instead of by n"
    if fits(lambda n: factor):
        return f"off by a factor of {factor:.4g} on any number of ranks: scaled after the average"
    if nearest and abs(divisor - nearest) < 1e-3 * nearest:
        return f"divided by the wrong number: by {nearest} on {n} ranks"
    return f"off by a factor of {factor:.4g} on {n} ranks: scaled, or clipped before finish returns"
