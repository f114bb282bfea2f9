"""Where gradients are wrong: in which tensors, at which elements, in which steps, as phrases."""

import functools
from collections.abc import Callable, Sequence

import torch

from cos598d.terminal.words import number_of
from cos598d.tools.check.comparison import Comparison

MOST_NAMES = 4
A_RUN = 8  # this many elements in a row are not right by chance
KINDS = (torch.float64, torch.float16, torch.bfloat16)
FEW_ELEMENTS = 64  # a remainder of cutting into chunks is not larger


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
        **{f"those of {str(kind)[6:]}": functools.partial(is_of, kind=kind) for kind in KINDS},
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
