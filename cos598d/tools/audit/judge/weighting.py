"""Faults of weighting: samples of one global batch that count unequally, and micro-batches that do not count at all."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.tools.audit.book import Book
from cos598d.tools.audit.judge.fit import BY_MICRO, MEAN, NEAR, NOTHING, Fit
from cos598d.tools.audit.judge.gradients import Fits, are_micro_batches, most_common, near, step_place
from cos598d.tools.audit.judge.partial import median_factors
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, where

Judged = tuple[list[AuditFinding], list[str]]
_MEANT = "which may be meant: they are of one batch, or made on two lines"


def judge_weighting(books: Sequence[Book], fits: Fits) -> Judged:
    """The faults of one group of ranks, and what could not be judged."""
    if len(books) < 2 or not fits.steps:
        return [], []
    known = [each for step in fits.steps for of_rank in step.fits for each in of_rank.values()]
    found, unjudged = _micro_batches(fits, known)
    unequal = _weights(fits)
    return found + unequal, unjudged or ([] if found or unequal else _examples(fits))


def judge_zeros(books: Sequence[Book], fits: Fits) -> list[AuditFinding]:
    """A loss that no weight changes: in all examined steps the gradients are 0, and later the loss stays what it is.

    A loss that is 0 for a while, as a hinge's may be, is none.
    """
    steps = [step for step in fits.steps if step.iteration in fits.zero]
    losses = {loss for book in books for row in book["iterations"] for loss in row["losses"]}
    if not steps or len(fits.zero) < max(len(book["steps"]) for book in books) or len(losses) > 1:
        return []
    seen = min(book["iterations_seen"] for book in books)
    says = f"In {len(fits.zero)} of {len(fits.zero)} examined steps every gradient of every rank is 0."
    constant = f"The loss is {next(iter(losses)):g} in all {seen} steps." if losses else ""
    micros = steps[0].rows[0]["micro"]
    place = where(micros[0]) if micros else step_place(fits)
    return [AuditFinding("zero_gradients", tuple(filter(None, (says, constant))), place)]


def _micro_batches(fits: Fits, known: Sequence[Fit]) -> Judged:
    micros = fits.steps[0].rows[0]["micro"]
    place: Where = where(micros[0]) if micros else ("", 0, "")
    if most_common(known) == NOTHING:
        says = f"Of {len(micros)} backward passes of a step the gradients of {len(micros)} are not in what is applied."
        return [AuditFinding("lost_micro_batches", (says,), place)], []
    lost = [each for each in known if (each.kind == BY_MICRO and min(map(abs, each.factors)) <= NEAR) or each.is_lost]
    uneven = [each for each in known if each.kind == BY_MICRO and min(map(abs, each.factors)) > NEAR]
    are_parts = all(are_micro_batches(row) for step in fits.steps for row in step.rows)
    if len(lost) * 2 > len([each for each in known if each.kind not in ("small", "unknown")]):
        number = len(lost[0].lost) or sum(abs(factor) <= NEAR for factor in lost[0].factors)
        says = f"Of {len(micros)} backward passes of a step the gradients of {number} are not in what is applied."
        if are_parts:
            return [AuditFinding("lost_micro_batches", (says,), place)], []
        return [], [f"gradients: o{says[1:-1]}, {_MEANT}."]
    if len(uneven) * 2 > len(known):
        factors = ", ".join(f"{factor:.3f}" for factor in median_factors(uneven))
        if are_parts:
            return [
                AuditFinding("unequal_micro_batches", (f"Their factors in what is applied: {factors}.",), place)
            ], []
        return [], [f"gradients: the factors of a step's backward passes in what is applied are {factors}, {_MEANT}."]
    return [], []


def _weights(fits: Fits) -> list[AuditFinding]:
    """Losses that are means of batches of different sizes and count alike, or of equal sizes and do not."""
    for step in fits.steps:
        if most_common(step.known()) != MEAN:
            continue
        micros = [row["micro"] for row in step.rows]
        ways = [*zip(*(_of_a_sample(each) for each in micros), strict=False)]
        if ways and not any(_are_alike(way) for way in ways):
            known = ways[0]
            sizes = ", ".join(str(sum(micro["size"] for micro in each)) for each in micros)
            says = f"Step {step.iteration}: the ranks have {sizes} samples, and a sample of theirs counts "
            says += f"{', '.join(f'{each / known[0]:.3f}' for each in known)} times one of rank 0."
            return [AuditFinding("unequal_weights", (says,), where(micros[0][0]))]
        ways = [*zip(*(_of_a_sample([micro]) for micro in micros[0]), strict=False)]
        if ways and are_micro_batches(step.rows[0]) and not any(_are_alike(way) for way in ways):
            sizes = ", ".join(str(micro["size"]) for micro in micros[0])
            says = f"Step {step.iteration}: losses of micro-batches of {sizes} samples are weighted by "
            says += f"{', '.join(format(micro['weight'], '.3g') for micro in micros[0])}."
            return [AuditFinding("unequal_micro_batches", (says,), where(micros[0][0]))]
    return []


def _examples(fits: Fits) -> list[str]:
    """A sentence on means over unequal numbers of examples, as of tokens that a loss does not ignore, that count the
    same: by the samples' number they count alike, by the examples' number they do not."""
    for step in fits.steps:
        if most_common(step.known()) != MEAN:
            continue
        by_rank = [row["micro"] for row in step.rows]
        ways = [("rank", each) for each in zip(*by_rank, strict=False)]
        ways += [("micro-batch", by_rank[0])] if are_micro_batches(step.rows[0]) else []
        for of, micros in ways:
            if len({micro["weight"] is None for micro in micros}) > 1:
                continue
            weights = [*map(_of_an_example, micros)]
            shares = [each / (micro["size"] or math.inf) for each, micro in zip(weights, micros, strict=True)]
            is_weighted = micros[0]["weight"] is None and all(shares) and _are_alike(shares)
            if all(weights) and not _are_alike(weights) and not is_weighted:
                said = ", ".join(f"{each / weights[0]:.3g}" for each in weights)
                why = f"step {step.iteration} has means over unequal numbers of them; by {of} one counts {said} times"
                return [f"gradients: whether examples (tokens) are to count alike: {why} one of the first."]
    return []


def _of_an_example(micro: Mapping[str, Any]) -> float:
    """How much an example weighs that the loss does not ignore; 0 if that is not known. A loss of which only its factor
    is known is one sum."""
    if micro["weight"] is None:
        return math.prod(micro["multiplied"]) / (math.prod(micro["divided"]) or math.inf)
    return micro["weight"] if micro["counts"] else micro["weight"] / (micro.get("kept") or math.inf)


def _of_a_sample(micros: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """How much a sample of these backward passes weighs, by how samples may be counted: as rows of the batch, or as
    what the losses are means or sums over. () where it is not known. Several losses of one batch are one loss of it.
    """
    weights = [micro["weight"] for micro in micros]
    sizes = {(*micro["samples"],): micro["size"] for micro in micros if micro["size"]}
    are_sums = [bool(micro["counts"]) for micro in micros]
    if None in weights or not sizes or any(each != are_sums[0] for each in are_sums):
        return ()
    rows = sum(sizes.values())
    if not are_sums[0]:
        of_examples = [*map(_of_an_example, micros)]
        return (sum(weights) / rows, *([sum(of_examples) / len(micros)] if all(of_examples) else []))
    of_rows = [sum(micro["weight"] * micro["counts"][place] for micro in micros) / rows for place in (0, -1)]
    return (sum(weights) / len(weights), *of_rows)


def _are_alike(weights: Sequence[float]) -> bool:
    return all(near(each, weights[0]) for each in weights)
