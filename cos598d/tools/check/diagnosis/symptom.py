"""What wrong gradients look like, by kind, with the sentence for each; and in which tensors, elements and steps."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cos598d.terminal.words import number_of
from cos598d.tools.check.comparison import Comparison

# Each with the largest relative error that a few such roundings cause in the mean (root mean square).
HALF = {"half precision (fp16)": 8e-4, "half precision (bf16)": 8e-3}
STALE, MIXED, NOT_ZEROED = STEP_KINDS = ("stale", "mixed with earlier steps", "not zeroed")
UNKNOWN = "unknown"
OF_HOLDERS = "divided by holders"
MOST_NAMES = 4
A_RUN = 8  # this many elements in a row are not right by chance
DTYPES = (torch.float64, torch.float16, torch.bfloat16)
FEW_ELEMENTS = 64  # a remainder of cutting into chunks is not larger


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


def tensors_of(comparison: Comparison) -> str:
    """Which tensors are wrong; "" if all are."""
    right = {name: tensor for name, tensor in comparison.right.items() if tensor is not None}
    wrong = set().union(*comparison.wrong)
    # Zeros are their own mean: that they are right shows nothing.
    good = [name for name, tensor in right.items() if name not in wrong and tensor.any()]
    bad = [name for name in right if name in wrong]
    if not good or not bad:
        return ""
    if not any(right[name].any() for name in bad):
        return "only on tensors whose gradient is zero"
    sizes = [right[name].numel() for name in bad], [right[name].numel() for name in good]

    def is_of(name: str, kind: torch.dtype) -> bool:
        found = comparison.found[0][name]
        return (right[name] if found is None else found).dtype == kind

    tellings: dict[str, Callable[[str], bool]] = {
        "biases": lambda name: name.endswith("bias"),
        "all except biases": lambda name: not name.endswith("bias"),
        **{f"those of {str(kind)[6:]}": functools.partial(is_of, kind=kind) for kind in DTYPES},
        "all except those of float64": lambda name: not is_of(name, torch.float64),
        "vectors": lambda name: right[name].dim() == 1,
        "matrices": lambda name: right[name].dim() > 1,
        f"those of {min(sizes[0])} elements and more": lambda name: right[name].numel() > max(sizes[1]),
        f"those of {max(sizes[0])} elements and fewer": lambda name: right[name].numel() < min(sizes[1]),
    }
    for words, tells in tellings.items():
        if all(tells(name) for name in bad) and not any(tells(name) for name in good) and len(bad) > 1:
            return f"only on some tensors: wrong on {words}"
    names = list(right)
    if bad == names[-len(bad) :] and len(bad) > 1:
        return f"only on some tensors: wrong from {bad[0]} on, the last {len(bad)} of {len(names)} in order"
    if bad == names[: len(bad)] and len(bad) > 1:
        return f"only on some tensors: wrong up to {bad[-1]}, the first {len(bad)} of {len(names)} in order"
    shown = ", ".join(bad[:MOST_NAMES]) + (f" and {len(bad) - MOST_NAMES} more" if len(bad) > MOST_NAMES else "")
    return f"only on some tensors: wrong on {shown}, right on {len(good)} others"


def elements_of(comparison: Comparison) -> str:
    """Which elements of the wrong tensors are wrong; "" if all are."""
    said = []
    for rank, names in enumerate(comparison.wrong):
        for name in names:
            found, right = comparison.found[rank][name], comparison.right[name]
            if found is None or right is None or right.numel() <= 8:
                continue
            wrong = comparison.off(rank, name)
            is_all = bool((wrong | (right == 0).flatten()).all())
            said.append(("" if is_all else _elements(name, wrong, len(comparison.found)), right.numel()))
    if not said or all(not words for words, _ in said):
        return ""
    # The longest tensor shows it best.
    return max((pair for pair in said if pair[0]), key=lambda pair: pair[1])[0]


def _elements(name: str, wrong: torch.Tensor, ranks: int) -> str:
    count, total = int(wrong.sum()), len(wrong)
    places = wrong.nonzero().flatten()
    first, last = int(places[0]), int(places[-1])
    is_dense = count > 0.9 * (last - first + 1)
    if is_dense and last >= total - 2 and (first >= A_RUN or total - first < FEW_ELEMENTS and first > 0):
        if total - first < min(FEW_ELEMENTS, total // 4):
            rest = f", the remainder of {total} divided by {ranks}" if total - first == total % ranks else ""
            return f"the last {total - first} of {total} elements of {name} are wrong{rest}"
        return f"only the first {first} of {total} elements of {name} are right"
    if is_dense and first <= 1 and total - last > A_RUN:
        return f"only the last {total - last - 1} of {total} elements of {name} are right"
    if count > 0.9 * total:
        return ""
    return f"{count} of {total} elements of {name} are wrong, from {first} to {last}"


def steps_of(comparisons: Sequence[Comparison]) -> str:
    """In which steps of a run it is wrong; "" if in all."""
    facts = [(each.facts, any(each.wrong)) for each in comparisons if each.facts]
    for words in dict.fromkeys(words for told, _ in facts for words in told):
        if len({is_wrong for _, is_wrong in facts}) == 2 and all(
            told.get(words, False) == wrong for told, wrong in facts
        ):
            return f"wrong only in steps {words}"
    runs: dict[str, list[Comparison]] = {}
    for each in comparisons:
        runs.setdefault(each.run, []).append(each)
    wrong_runs = [run for run, each in runs.items() if any(any(one.wrong) for one in each)]
    if facts and len(wrong_runs) < len(runs):
        return f"only with {' and '.join(wrong_runs)}"
    longest = max(runs.values(), key=len)
    wrong = [any(each.wrong) for each in longest]
    if len(wrong) < 3 or all(wrong) or not any(wrong):
        return ""
    first = wrong.index(True)
    if all(wrong[first:]):
        return f"right only for the first {number_of(first, 'step')}, wrong after that"
    if not any(wrong[wrong.index(False) :]):
        return f"wrong only in the first {wrong.index(False)} steps"
    bad = [step for step, is_wrong in enumerate(wrong) if is_wrong]
    if len(bad) > 1 and len({b - a for a, b in zip(bad, bad[1:])}) == 1 and bad[1] - bad[0] > 2:
        return f"wrong only in every {_nth(bad[1] - bad[0])} step"
    right = [step for step, is_wrong in enumerate(wrong) if not is_wrong]
    gaps = {b - a for a, b in zip(right, right[1:])}
    if len(gaps) == 1 and len(right) < len(wrong):
        return f"right only in every {_nth(gaps.pop())} step" if gaps != {1} else ""
    return f"wrong in {sum(wrong)} of {len(wrong)} steps"


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
