"""Faults of weighting: samples, micro-batches, ranks and parts that count unequally in a step, or not at all."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.tools.audit.book import BROADCAST, GRADIENT, SCATTER, Book
from cos598d.tools.audit.judge.fit import BY_BOTH, BY_MICRO, BY_RANK, INDISTINCT, MEAN, NEAR, NOTHING, OWN, Fit
from cos598d.tools.audit.judge.gradients import (
    Fits,
    StepFits,
    are_micro_batches,
    calls_of,
    gradient_place,
    most_common,
    named,
    near,
    step_place,
)
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, where

Judged = tuple[list[AuditFinding], list[str]]
_MEANT = "which may be meant: they are of one batch, or made on two lines"
_FLAT = "flat_param"  # of FSDP's first form: its parts have different weights in them


def median_factors(fits: Sequence[Fit]) -> tuple[float, ...]:
    """The factors of several tensors as one."""
    if not fits:
        return ()
    count = len(fits[0].factors)
    alike = [each for each in fits if len(each.factors) == count]
    return tuple(statistics.median(each.factors[place] for each in alike) for place in range(count))


def combination(factors: Sequence[float]) -> str:
    """A sentence on the factors by rank, of which 1 is what an average has."""
    ranks = len(factors)
    parts = " + ".join(f"{factor / ranks:.3f} g{place}" for place, factor in enumerate(factors))
    return f"The applied gradient is {parts}, where an average is {1 / ranks:.3f} of each."


def absent_from(factors: Sequence[float]) -> list[int]:
    """The ranks of which nothing is in it, next to the others' factors: a gradient scaler makes all of them small."""
    most = max(map(abs, factors))
    return [rank for rank, factor in enumerate(factors) if abs(factor) <= NEAR * most]


def partial_average(fits: Fits, factors: Sequence[float], absent: Sequence[int], says: str) -> AuditFinding:
    """The finding, with `says` as its first sentence."""
    there = [rank for rank in range(len(factors)) if rank not in absent]
    who = f"Of ranks {', '.join(map(str, absent))} nothing is in it, only of {', '.join(map(str, there))}."
    calls = [each for each in calls_of(fits.steps[0], GRADIENT) if each["op"] in (BROADCAST, SCATTER)]
    return AuditFinding("partial_average", (says, who), where(calls[-1]) if calls else gradient_place(fits))


def _is_of_a_group(fits: Fits, name: str) -> bool:
    """Whether a tensor's gradient travels among some ranks only, as that of an expert that these ranks share."""
    step = fits.steps[0]
    calls = [each for rank in range(len(step.rows)) for each in calls_of(step, GRADIENT, rank)]
    return any(name in each["names"] and len(each["ranks"]) < len(step.rows) for each in calls)


def partial_of_some(fits: Fits, names: Sequence[str]) -> list[AuditFinding]:
    """Some tensors to which every rank applies what some ranks computed: in all steps the same ranks' on all."""
    found: dict[str, tuple[float, ...]] = {}
    for name in names:
        of_name = [[of_rank.get(name) for of_rank in step.fits] for step in fits.steps]
        known = [each for step in of_name for each in step if each and each.kind in (BY_RANK, BY_BOTH)]
        absent = {(*absent_from(each.factors),) for each in known}
        if len(absent) != 1 or absent == {()} or _is_of_a_group(fits, name):
            continue
        nothing_of = next(iter(absent))
        # The rank whose gradient it is applies its own.
        others = [(rank, each) for step in of_name for rank, each in enumerate(step) if each and each not in known]
        if all(each.kind == OWN and rank not in nothing_of for rank, each in others):
            found[name] = median_factors(known)
    if not found:
        return []
    factors = next(iter(found.values()))
    combined = combination(factors)
    says = f"Of {len(names)} tensors {len(found)} ({named([*found])}): {combined[0].lower()}{combined[1:]}"
    return [partial_average(fits, factors, absent_from(factors), says)]


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


def judge_parts(step: StepFits, place: Where) -> list[AuditFinding]:
    """What it means that the ranks apply different multiples of the average, each to its own parts of the weights.

    Only parts of the same weights are compared: weights of their own may be scaled by factors of their own. A flat
    weight's parts hold different ones, so there only a clip by torch's function is told.
    """
    known = [{name: each.factor for name, each in of.items() if each.kind in (MEAN, INDISTINCT)} for of in step.fits]
    common = [name for name in known[0] if all(name in of for of in known) and name in step.rows[0]["places"]]
    clips = [clip for clip in map(_clip, step.rows) if clip is not None and clip["norm"]]
    norms = [clip["norm"] for clip in clips] if len(clips) == len(step.rows) else []
    by_own_norm = bool(norms) and max(norms) - min(norms) > NEAR * max(norms)
    if not by_own_norm:
        common = [name for name in common if not name.endswith(_FLAT)]
    if not common:
        return []
    factors = [statistics.median(of[name] for name in common) for of in known]
    if max(factors) - min(factors) <= NEAR * max(map(abs, factors)):
        return []
    said = ", ".join(f"rank {rank} {factor:.3f}" for rank, factor in enumerate(factors))
    says = f"Step {step.iteration}: of one average the ranks apply different multiples to their own parts: {said}."
    if by_own_norm:
        told = f"They clip to {clips[0]['limit']:g} by norms of {', '.join(f'{norm:.3f}' for norm in norms)}, by rank."
        return [AuditFinding("clipped_by_part", (says, told), where(clips[0]))]
    if all(0 < factor <= 1 + NEAR for factor in factors):
        return [AuditFinding("clipped_by_part", (says,), place)]
    return [AuditFinding("different_gradients", (says,), place)]


def _clip(row: dict[str, Any]) -> dict[str, Any] | None:
    """The last clip by torch's function in a step."""
    return next((each for each in reversed(row["events"]) if each["kind"] == "clip" and each["how"] == "norm"), None)
