"""From the books to fits: what each rank applied to each tensor in every judged step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cos598d.tools.audit.book import GRADIENT, Book
from cos598d.tools.audit.judge.fit import (
    BY_BOTH,
    BY_MICRO,
    BY_RANK,
    INDISTINCT,
    NEAR,
    OWN,
    OWN_STALE,
    PARTLY_OWN,
    SMALL,
    UNKNOWN,
    Fit,
    fit,
    fit_ones,
)
from cos598d.tools.audit.judge.verdict import Where, where
from cos598d.tools.audit.sketch import SIZE, from_text

_EXACT, _ROUNDED = 1e-3, 3e-2  # what a fit may leave of the gradient, in float32 and in fewer digits
_FEW_DIGITS = ("float16", "bfloat16")
ALL_ZERO = "all of them are 0"


@dataclass(frozen=True)
class StepFits:
    """What the ranks of one group applied in one step, by rank and the tensor's name."""

    iteration: int
    rows: Sequence[dict[str, Any]]  # the books' rows of this step, by place in the group
    fits: Sequence[dict[str, Fit]]

    def known(self) -> list[Fit]:
        """The fits that are informative."""
        return [each for of_rank in self.fits for each in of_rank.values() if each.kind not in (SMALL, UNKNOWN)]


@dataclass(frozen=True)
class Fits:
    """All fits of a group of ranks: the number of steps in which gradients were `judged`, and why not in others."""

    steps: Sequence[StepFits]
    unjudged: Sequence[str]
    judged: int
    zero: Sequence[int] = ()  # steps in which every gradient of every rank is 0


def groups_of(books: Sequence[Book]) -> list[list[Book]]:
    """The books, grouped by the ranks among which gradients were sent; one group if none were."""
    sent = [ranks for book in books for ranks in book["groups"] if len(ranks) > 1]
    if not sent or are_replicas(books):
        return [list(books)]
    groups = [{book["rank"]} for book in books]
    for ranks in sent:
        met = [group for group in groups if group.intersection(ranks)]
        groups = [group for group in groups if group not in met] + [set().union(*met)]
    found = [[book for book in books if book["rank"] in group] for group in groups]
    return sorted(found, key=lambda group: group[0]["rank"])


def are_replicas(books: Sequence[Book]) -> bool:
    """Whether all ranks begin with the same weights."""
    first = books[0]["start"].get("weights", {})
    return bool(first) and all(book["start"].get("weights", {}) == first for book in books[1:])


def tolerance_of(books: Sequence[Book]) -> float:
    """How much a fit may leave: more if something on the way has fewer digits than float32."""
    return _ROUNDED if are_rounded(books) else _EXACT


def are_rounded(books: Sequence[Book]) -> bool:
    """Whether something on the way has fewer digits than float32."""
    dtypes = {book["model"].get("dtype", "") for book in books}
    dtypes |= {entry["dtype"] for book in books for entry in book["ledger"] if entry["kind"] == "gradient"}
    return bool(dtypes.intersection(_FEW_DIGITS))


def fit_steps(books: Sequence[Book]) -> Fits:
    """The fits of a group of ranks."""
    tolerance = tolerance_of(books)
    steps, judged = [], 0
    unjudged: dict[str, list[int]] = {}
    by_iteration = [{step["iteration"]: step for step in book["steps"]} for book in books]
    for iteration in sorted(set().union(*by_iteration)):
        rows = [steps.get(iteration) for steps in by_iteration]
        present = [row for row in rows if row is not None]
        why = _why_not(present, len(books))
        found = [_of_rank(present, place, tolerance) for place in range(len(present))] if not why else []
        step = StepFits(iteration, present, found)
        if found and all(each.kind == SMALL for of_rank in found for each in of_rank.values()):
            why = ALL_ZERO
        if not why and not step.known():
            why = (
                "what was applied is no combination of what the ranks computed (compressed, or changed by other means)"
            )
        if not why and all(each.kind == INDISTINCT for each in step.known()):
            why = "the ranks computed the same gradient, so their average equals each of them"
        if why:
            unjudged.setdefault(why, []).append(iteration)
        judged += not why
        if not why or any(found):
            steps.append(step)
    said = [f"gradients of {number_of_steps(those)}: {why}." for why, those in unjudged.items()]
    return Fits(steps, said, judged, unjudged.get(ALL_ZERO, []))


def number_of_steps(steps: Sequence[int]) -> str:
    """The steps by their numbers; a range if they follow each other."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    is_range = len(steps) == steps[-1] - steps[0] + 1
    return f"steps {steps[0]} to {steps[-1]}" if is_range else f"steps {', '.join(map(str, steps))}"


def _why_not(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    if len(rows) < ranks:
        return "not every rank reached them"
    if any(row["has_closure"] for row in rows):
        return "they are computed within the optimizer's step"
    if any(row["is_skipped"] for row in rows):
        return "the step was skipped because of an overflow"
    if any(row.get("in_shards") for row in rows):
        return "each rank steps shards of the parameters, and no rank has the whole average"
    if not all(row["applied"] for row in rows):
        return "no optimizer of torch.optim applied any"
    if not all(row["local"] for row in rows):
        return "no gradient of a weight was seen while it was computed"
    if not any(row["applied"].keys() & row["local"].keys() for row in rows):
        return "the optimizer does not step the tensors whose gradients were computed"
    if len({len(row["micro"]) for row in rows}) > 1:
        return "the ranks made different numbers of backward passes"
    return ""


def are_micro_batches(row: dict[str, Any]) -> bool:
    """Whether the backward passes of a step are of one loss, each on its own samples, as in accumulation.

    Otherwise they are several losses, of one batch or on several lines. The script chooses their weights.
    """
    return have_own_samples(row) and len({(*each["where"],) for each in row["micro"]}) == 1


def have_own_samples(row: dict[str, Any]) -> bool:
    """Whether each backward pass of a step is of its own samples. They may be on several lines: under `no_sync` and
    without it."""
    micros = row["micro"]
    samples = [sample for each in micros for sample in each["samples"]]
    return len(set(samples)) > len(samples) / 2 and all(each["samples"] for each in micros)


def _of_rank(rows: Sequence[dict[str, Any]], place: int, tolerance: float) -> dict[str, Fit]:
    micros = len(rows[0]["micro"])
    names = dict.fromkeys(name for row in rows for name in row["local"])
    own = rows[place]
    local = {name: _local(rows, name, micros) for name in names if name in own["applied"]}
    local = {name: each for name, each in local.items() if np.isfinite(each).all()}
    largest = max((float(np.linalg.norm(each.sum(1), axis=1).max()) for each in local.values()), default=0.0)
    found, ones = {}, {}
    for name, each in local.items():
        applied = from_text(own["applied"][name])
        before = from_text(own["before"][name]) if name in own["before"] else None
        if np.isfinite(applied).all() and (before is None or np.isfinite(before).all()):
            elements = own["elements"].get(name, SIZE)
            if elements == 1:
                ones[name] = (applied, each, before)
            else:
                found[name] = fit(applied, each, before, place, tolerance, largest, elements)
    return found | fit_ones(ones, [*found.values()], place, tolerance, largest)


def _local(rows: Sequence[dict[str, Any]], name: str, micros: int) -> np.ndarray:
    """Sketches by rank and micro-batch. A rank that did not use the tensor counts as zero."""
    found = np.zeros((len(rows), micros, SIZE))
    for place, row in enumerate(rows):
        for micro, text in enumerate(row["local"].get(name, [])[:micros]):
            if text is not None:
                found[place, micro] = from_text(text)
    return found


def calls_of(step: StepFits, carries: str, rank: int = 0) -> list[dict[str, Any]]:
    """A rank's calls in a step that carried `carries`."""
    return [each for each in step.rows[rank]["events"] if each["kind"] == "call" and each["carries"] == carries]


def step_place(fits: Fits) -> Where:
    """Where the optimizer steps; if that is unknown, where the loss is."""
    row = fits.steps[0].rows[0]
    steps = [each for each in row["events"] if each["kind"] == "step"]
    if steps:
        return where(steps[0])
    return where(row["micro"][0]) if row["micro"] else ("", 0, "")


def gradient_place(fits: Fits, step: StepFits | None = None) -> Where:
    """Where `step`, by default the first one, made its last call that carries gradients; without one, `step_place`."""
    calls = calls_of(step or fits.steps[0], GRADIENT)
    return where(calls[-1]) if calls else step_place(fits)


def named(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def near(value: float, other: float) -> bool:
    """Whether two factors are equal up to rounding."""
    return abs(value - other) <= NEAR * abs(other)


def not_understood(fits: Fits) -> list[str]:
    """A sentence about tensors to which neither an average nor an own gradient is applied in most steps."""
    of: dict[tuple[str, int], list[str]] = {}
    for step in fits.steps:
        for rank, of_rank in enumerate(step.fits):
            for name, each in of_rank.items():
                if each.kind != SMALL:
                    of.setdefault((name, rank), []).append(each.kind)
    unclear = (UNKNOWN, BY_MICRO, BY_RANK, BY_BOTH, PARTLY_OWN, OWN, OWN_STALE)
    names = [name for (name, _), kinds in of.items() if sum(kind in unclear for kind in kinds) * 2 > len(kinds)]
    if not names:
        return []
    names, every = [*dict.fromkeys(names)], {name for name, _ in of}
    what = f"to {len(names)} of {len(every)} tensors"
    return [f"gradients: {what} no multiple of the average is applied, on some rank or all ({named(names)})."]


def most_common(fits: Iterable[Fit]) -> str:
    """The kind of most fits, without those that are not informative."""
    kinds = Counter(each.kind for each in fits if each.kind not in (SMALL, UNKNOWN))
    return kinds.most_common(1)[0][0] if kinds else UNKNOWN
