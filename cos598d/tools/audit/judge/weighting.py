"""Faults of weighting: samples, micro-batches, ranks and parts that count unequally in a step, or not at all."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.tools.audit.book import BROADCAST, GRADIENT, SCATTER, Book
from cos598d.tools.audit.judge.fit import BY_BOTH, BY_MICRO, BY_RANK, MEAN, NEAR, NOTHING, OWN, Fit
from cos598d.tools.audit.judge.gradients import (
    Fits,
    are_micro_batches,
    calls_of,
    gradient_place,
    have_own_samples,
    most_common,
    named,
    near,
    step_place,
)
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, loss_place, where

Judged = tuple[list[AuditFinding], list[str]]
_MEANT = "which may be meant: they are of one batch, or made on two lines"


def median_factors(fits: Sequence[Fit]) -> tuple[float, ...]:
    """The factors of several tensors, as one."""
    if not fits:
        return ()
    count = len(fits[0].factors)
    alike = [each for each in fits if len(each.factors) == count]
    return tuple(statistics.median(each.factors[place] for each in alike) for place in range(count))


def combination(factors: Sequence[float]) -> str:
    """A sentence about the factors by rank. An average has 1 for each."""
    ranks = len(factors)
    parts = " + ".join(f"{factor / ranks:.3f} g{place}" for place, factor in enumerate(factors))
    return f"The applied gradient is {parts}, where an average is {1 / ranks:.3f} of each."


def absent_from(factors: Sequence[float]) -> list[int]:
    """The ranks of which nothing is in it, compared with the others: a gradient scaler makes all factors small."""
    most = max(map(abs, factors))
    return [rank for rank, factor in enumerate(factors) if abs(factor) <= NEAR * most]


def partial_average(fits: Fits, factors: Sequence[float], absent: Sequence[int], says: str) -> AuditFinding:
    """The finding, with `says` as its first sentence."""
    there = [rank for rank in range(len(factors)) if rank not in absent]
    who = f"Of ranks {', '.join(map(str, absent))} nothing is in it, only of {', '.join(map(str, there))}."
    calls = [each for each in calls_of(fits.steps[0], GRADIENT) if each["op"] in (BROADCAST, SCATTER)]
    return AuditFinding("partial_average", (says, who), where(calls[-1]) if calls else gradient_place(fits))


def _is_of_a_group(fits: Fits, name: str) -> bool:
    """Whether a tensor's gradient is sent only among some ranks, such as that of an expert that these ranks share."""
    step = fits.steps[0]
    calls = [each for rank in range(len(step.rows)) for each in calls_of(step, GRADIENT, rank)]
    return any(name in each["names"] and len(each["ranks"]) < len(step.rows) for each in calls)


def partial_of_some(fits: Fits, names: Sequence[str]) -> list[AuditFinding]:
    """Tensors to which every rank applies the gradients of only some ranks: in all steps those of the same ranks."""
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
    unequal, open_questions = _weights(fits)
    found = _clipped_each(fits) + _leftover(books) + found + unequal
    return found, unjudged or ([] if found else open_questions)


def _clipped_each(fits: Fits) -> list[AuditFinding]:
    """Clips by torch's functions between the backward passes of one step."""
    for step in fits.steps:
        row = step.rows[0]
        last = len(row["micro"]) - 1
        early = [each for each in row["events"] if each["kind"] == "clip" and each["micro"] < last]
        if early and have_own_samples(row):
            says = f"Step {step.iteration}: gradients are clipped to {early[0]['limit']:g} after backward pass "
            says += f"{early[0]['micro'] + 1} of {last + 1}."
            return [AuditFinding("clipped_by_micro_batch", (says,), where(early[0]))]
    return []


def _leftover(books: Sequence[Book]) -> list[AuditFinding]:
    """Steps with more backward passes than most, because an epoch that ended without a step has left some."""
    rows = books[0]["iterations"]
    passes = [row["passes"] for row in rows]
    within = [row["passes"] for row in rows if not row["begins_epoch"]]
    usual = statistics.mode(within) if within else 0
    more = [place for place, row in enumerate(rows, 1) if row["begins_epoch"] and row["passes"] > usual > 1]
    if not more:
        return []
    says = f"Step {more[0]} has {passes[more[0] - 1]} backward passes, and a step within an epoch has {usual}. "
    says += f"An epoch of the data began within it, and within {len(more)} such steps of {len(passes)} in all."
    return [AuditFinding("leftover_micro_batches", (says,), loss_place(books))]


def judge_zeros(books: Sequence[Book], fits: Fits) -> list[AuditFinding]:
    """A loss that depends on no weight: in all examined steps the gradients are 0, and later the loss does not change.

    A loss that is 0 for a while, such as a hinge loss, is not one.
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
    by_micro = [each for each in known if each.kind == BY_MICRO]
    lost = [each for each in by_micro if min(map(abs, each.factors)) <= NEAR]
    uneven = [each for each in by_micro if each not in lost]
    are_parts = all(are_micro_batches(row) for step in fits.steps for row in step.rows)
    if len(lost) * 2 > len([each for each in known if each.kind not in ("small", "unknown")]):
        number = sum(abs(factor) <= NEAR for factor in lost[0].factors)
        says = f"Of {len(micros)} backward passes of a step the gradients of {number} are not in what is applied."
        if are_parts:
            return [AuditFinding("lost_micro_batches", (says,), place)], []
        return [], [f"gradients: o{says[1:-1]}, {_MEANT}."]
    if len(uneven) * 2 > len(known):
        factors = ", ".join(f"{factor:.3f}" for factor in median_factors(uneven))
        if are_parts:
            says = f"Their factors in what is applied: {factors}."
            return [AuditFinding("lost_micro_batches", (says,), place)], []
        return [], [f"gradients: the factors of a step's backward passes in what is applied are {factors}, {_MEANT}."]
    return [], []


def _weights(fits: Fits) -> Judged:
    """Losses that are means of unequal numbers and count equally, or of equal numbers and do not.

    What counts may be samples, or examples such as tokens that a loss does not ignore. If only one of both counts
    alike, either may be meant.
    """
    for step in fits.steps:
        if most_common(step.known()) != MEAN:
            continue
        by_rank = [row["micro"] for row in step.rows]
        ways = [("rank", by_rank)]
        ways += [("micro-batch", [[each] for each in by_rank[0]])] if are_micro_batches(step.rows[0]) else []
        for of, parts in ways:
            if len({micro["weight"] is None for each in parts for micro in each}) > 1:
                continue  # known in two ways, which say nothing of each other
            of_samples, of_examples = zip(*map(_weights_in, parts), strict=True)
            known = [each for each in (of_samples, of_examples) if all(each)]
            if not known or (len(known) == 2 and all(map(_are_alike, known))):
                continue
            said = ", ".join(f"{each / known[-1][0]:.3g}" for each in known[-1])
            sizes = [sum(micro["size"] for micro in each) for each in parts]
            if parts[0][0]["weight"] is not None and not any(map(_are_alike, known)):
                says = f"Step {step.iteration}: by {of} there are {', '.join(map(str, sizes))} samples, and one counts "
                name = "unequal_weights" if of == "rank" else "lost_micro_batches"
                return [AuditFinding(name, (f"{says}{said} times one of the first.",), where(parts[0][0]))], []
            shares = [each / (size or math.inf) for each, size in zip(of_examples, sizes, strict=True)]
            is_weighted = parts[0][0]["weight"] is None and all(shares) and _are_alike(shares)
            if all(of_examples) and not _are_alike(of_examples) and not is_weighted:
                why = f"step {step.iteration} has means over unequal numbers of them; by {of} one counts {said} times"
                question = f"gradients: whether examples (tokens) are to count alike: {why} one of the first."
                return [], [question]
    return [], []


def _weights_in(micros: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The weight of a sample and of an example in these backward passes; 0 where it is not known.

    Several losses of one batch count as one loss of it. If only a loss's factor is known, it counts as one sum.
    """
    if all(micro["weight"] is None for micro in micros):
        factors = [math.prod(micro["multiplied"]) / (math.prod(micro["divided"]) or math.inf) for micro in micros]
        return 0.0, statistics.mean(factors)
    if any(micro["weight"] is None or micro["is_sum"] != micros[0]["is_sum"] for micro in micros):
        return 0.0, 0.0
    rows = sum({(*micro["samples"],): micro["size"] for micro in micros}.values())
    per = [1.0 if micro["is_sum"] else 1 / (micro["examples"] or math.inf) for micro in micros]
    of_examples = [micro["weight"] * each for micro, each in zip(micros, per, strict=True)]
    sums = [micro["weight"] * (micro["examples"] if micro["is_sum"] else 1) for micro in micros]
    return sum(sums) / (rows or math.inf), statistics.mean(of_examples) if all(of_examples) else 0.0


def _are_alike(weights: Sequence[float]) -> bool:
    return all(near(each, weights[0]) for each in weights)
