"""Faults of averaging: how gradients were combined, by the factors of the fits and the order of the calls."""

import statistics
from collections.abc import Sequence
from typing import Any

from cos598d.terminal.words import ranks_in_words
from cos598d.tools.audit.book import (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    GRADIENT,
    OTHER,
    REDUCE,
    SCATTER,
    WEIGHT,
    Book,
)
from cos598d.tools.audit.judge.fit import (
    BY_BOTH,
    BY_RANK,
    INDISTINCT,
    MEAN,
    NEAR,
    OWN,
    OWN_STALE,
    PARTLY_OWN,
    STALE,
    Fit,
)
from cos598d.tools.audit.judge.gradients import (
    Fits,
    StepFits,
    are_micro_batches,
    are_rounded,
    calls_of,
    gradient_place,
    most_common,
    named,
    step_place,
)
from cos598d.tools.audit.judge.scale import judge_scale
from cos598d.tools.audit.judge.verdict import AuditFinding, where
from cos598d.tools.audit.judge.weighting import (
    absent_from,
    combination,
    median_factors,
    partial_average,
    partial_of_some,
)

_COMMON = (
    "gradients: whether a sum of them is meant or an average: the losses of all ranks are one and the same number."
)


def judge_averaging(books: Sequence[Book], fits: Fits) -> tuple[list[AuditFinding], list[str]]:
    """The faults of one group of ranks, and what could not be judged. Only causes: if several explain the same, the
    first."""
    if len(books) < 2 or not fits.steps:
        return [], []
    by_tensor: dict[str, list[list[Fit]]] = {}  # by name: of every rank, in all steps
    for step in fits.steps:
        for place, of_rank in enumerate(step.fits):
            for name, each in of_rank.items():
                by_tensor.setdefault(name, [[] for _ in books])[place].append(each)
    kinds = {name: [most_common(each) for each in ranks] for name, ranks in by_tensor.items()}
    # A tensor that only one rank steps is that rank's: the others need no average of it.
    by_steppers = {name: [most_common(each) for each in ranks if each] for name, ranks in by_tensor.items()}
    own = [name for name, each in by_steppers.items() if each and all(kind in (OWN, OWN_STALE) for kind in each)]
    # What is averaged in some steps is another fault.
    own = [name for name in own if not any(each.kind == MEAN for ranks in by_tensor[name] for each in ranks)]
    ops = {each["op"] for each in calls_of(fits.steps[0], GRADIENT)}
    to_one = bool(ops) and ops <= {GATHER, REDUCE}
    at_root = [name for name in kinds if all(by_tensor[name]) and _is_at_root(kinds[name], to_one)]
    told = [name for name, each in kinds.items() if any(kind not in ("small", "unknown") for kind in each)]
    found: list[AuditFinding] = []
    if at_root and len(at_root) >= len(own):
        found.append(_not_scattered(fits, at_root, kinds))
    elif own and len(own) == len(told):
        are_owned = all(len(by_steppers[name]) == 1 for name in own)
        found.append(_alone(books, fits, len(own), are_owned))
    elif own:
        found.append(_forgotten(fits, own, len(told)))
    left_out = {*own, *(at_root if found and found[0].name == "not_scattered" else ())}
    rest = [name for name in by_tensor if name not in left_out]
    found += _partly(fits, rest) or _mixed(books, fits, rest)
    unjudged: list[str] = []
    by_rank = _by_rank(fits, rest) or partial_of_some(fits, [name for name in rest if _begins_alike(books, name)])
    if not by_rank:
        by_rank, unjudged = judge_scale(len(books), fits, rest, are_rounded(books), _gathers(books))
        if _is_loss_common(books, fits) and all(each.name in ("summed", "averaged_twice") for each in by_rank):
            by_rank, unjudged = [], [_COMMON]
    return found + by_rank + _stale(
        fits, [each for ranks in by_tensor.values() for of_rank in ranks for each in of_rank]
    ), unjudged


def _gathers(books: Sequence[Book]) -> bool:
    """Whether each step brings together numbers that are neither gradients nor weights, as a contrastive loss does."""
    first = books[0]
    gathered = [each for each in first["ledger"] if each["op"] in (ALL_GATHER, ALL_TO_ALL) and each["kind"] == OTHER]
    return sum(each["calls"] for each in gathered) >= first["iterations_seen"] > 0


def _is_loss_common(books: Sequence[Book], fits: Fits) -> bool:
    """Whether all ranks have the same loss in every judged step, though their gradients differ.

    Then the loss is one of all ranks' examples, and each rank computes its own examples' part of the gradient. A
    contrastive loss of gathered outputs is like this.
    """
    if len(books) < 2 or not fits.steps:
        return False
    for step in fits.steps:
        losses = [book["iterations"][step.iteration - 1 :][:1] for book in books]
        rows = [each[0]["losses"] for each in losses if each]
        if len(rows) < len(books) or not rows[0] or any(len(each) != len(rows[0]) for each in rows):
            return False
        if any(abs(a - b) > 1e-6 * abs(b) for each in rows for a, b in zip(each, rows[0], strict=True)):
            return False
    return True


def judge_clip_order(books: Sequence[Book], fits: Fits) -> list[AuditFinding]:
    """Find clips before the gradients are sent, even if they did nothing in the examined steps."""
    for step in fits.steps:
        if most_common(step.known()) not in (MEAN, BY_RANK, BY_BOTH, INDISTINCT):
            continue
        places = [_clip_before(row) for row in step.rows]
        clips = [each for each in places if each is not None]
        if len(clips) < len(step.rows):
            continue
        factors = median_factors([each for each in step.known() if each.kind in (BY_RANK, BY_BOTH)])
        said = [_norms(clips)]
        if factors:
            said.append(combination(factors))
        else:
            said.append("It did nothing in this step, for every norm was under the limit: it will where one is above.")
        return [
            AuditFinding("clipped_before_average", (f"Step {step.iteration}: {said[0]}", *said[1:]), where(clips[0]))
        ]
    return []


def _is_at_root(kinds: Sequence[str], to_one: bool) -> bool:
    """Whether only one rank has the average. A reduce leaves partial sums on the others."""
    others = len(kinds) - kinds.count(MEAN) if to_one else kinds.count(OWN)
    return kinds.count(MEAN) == 1 and others == len(kinds) - 1


def _begins_alike(books: Sequence[Book], name: str) -> bool:
    """Whether all ranks begin with the same weight. If only some share it, it is rightly averaged over these."""
    return len({book["start"].get("weights", {}).get(name) for book in books}) == 1


def _alone(books: Sequence[Book], fits: Fits, tensors: int, are_owned: bool) -> AuditFinding:
    """Why every rank applies its own gradient. `are_owned`: each tensor is stepped on one rank."""
    residual = max((each.residual for step in fits.steps for each in step.known() if each.kind == OWN), default=0.0)
    says = (
        f"In {fits.judged} of {fits.judged} judged steps the gradient that {'its' if are_owned else 'each'} "
        f"{'owner' if are_owned else 'rank'} applied to each of {tensors} tensors is {'the ' if are_owned else 'its '}"
        f"{'owner' + chr(39) + 's ' if are_owned else ''}own (left over: {residual:.0e} of it)."
    )
    weights = [] if are_owned else _averaged_weights(books)
    seen = books[0]["iterations_seen"]
    if weights:
        calls = sum(entry["calls"] for entry in weights)
        most = max(entry["calls"] for entry in weights)
        name = "weights_averaged" if most >= 0.9 * max(seen - 1, 1) else "local_steps"
        travel = f"Weights travel instead, in {calls} calls of {seen} steps ({weights[0]['op']})."
        return AuditFinding(name, (says, travel), where(weights[0]))
    calls = calls_of(fits.steps[0], GRADIENT)
    if calls:
        moved = f"{len(calls)} calls of {calls[0]['op']} carried gradients in step {fits.steps[0].iteration}."
        return AuditFinding("result_dropped", (says, moved), where(calls[-1]))
    return AuditFinding("never_averaged", (says, "No call carried a gradient."), step_place(fits))


def _averaged_weights(books: Sequence[Book]) -> list[dict[str, Any]]:
    """The calls that combined several ranks' weights after the first step."""
    if any(book["model"].get("sharded") for book in books):
        return []  # they are gathered, and not averaged
    entries = [entry for entry in books[0]["ledger"] if entry["kind"] == WEIGHT and entry["first_iteration"] >= 1]
    return [entry for entry in entries if entry["op"] not in (BROADCAST, SCATTER)]


def _partly(fits: Fits, names: Sequence[str]) -> list[AuditFinding]:
    """Backward passes of a step after which nothing is sent."""
    for step in fits.steps:
        known = [of_rank[name] for of_rank in step.fits for name in names if name in of_rank]
        partly = [each for each in known if each.kind == PARTLY_OWN]
        if len(partly) * 2 > len(known):
            passes = len(step.rows[0]["micro"])
            says = f"Step {step.iteration}: of {passes} backward passes {len(partly[0].lost)} are in what each rank "
            says += "applies by that rank's own gradient only."
            return [AuditFinding("lost_micro_batches", (says,), gradient_place(fits, step))]
    return []


def _mixed(books: Sequence[Book], fits: Fits, names: Sequence[str]) -> list[AuditFinding]:
    """Ranks that apply their own gradient in some step, while the average is applied on others or in other steps."""
    alone: dict[int, list[int]] = {}
    means = 0
    for step in fits.steps:
        for place, of_rank in enumerate(step.fits):
            known = [of_rank[name] for name in names if name in of_rank]
            is_given = any(other[name].kind == BY_RANK for other in step.fits for name in names if name in other)
            if most_common(known) in (OWN, OWN_STALE) and not is_given:
                alone.setdefault(step.iteration, []).append(place)
            means += most_common(known) == MEAN
    if not alone or not means:
        return []
    said = [f"in step {step} on {ranks_in_words(ranks)}" for step, ranks in alone.items()]
    says = f"Where {means} times a rank applies the average, it is its own gradient {', '.join(said)}."
    if weights := _averaged_weights(books):
        return [AuditFinding("local_steps", (says,), where(weights[0]))]
    return [AuditFinding("different_gradients", (says,), step_place(fits))]


def _not_scattered(fits: Fits, names: Sequence[str], kinds: dict[str, list[str]]) -> AuditFinding:
    root = kinds[names[0]].index(MEAN)
    others = [rank for rank in range(len(kinds[names[0]])) if rank != root]
    says = (
        f"On rank {root} the average of all ranks is applied to {len(names)} tensors, "
        f"on {ranks_in_words(others)} it is not."
    )
    calls = [each for each in calls_of(fits.steps[0], GRADIENT) if each["op"] in (GATHER, REDUCE)]
    return AuditFinding("not_scattered", (says,), where(calls[-1]) if calls else gradient_place(fits))


def _forgotten(fits: Fits, names: Sequence[str], tensors: int) -> AuditFinding:
    says = f"{len(names)} of {tensors} tensors are stepped by a rank's own gradient: {named(names)}."
    return AuditFinding("forgotten_tensors", (says,), gradient_place(fits))


def _by_rank(fits: Fits, names: Sequence[str]) -> list[AuditFinding]:
    """The reason why the ranks' factors differ."""
    for step in fits.steps:
        factors = _unequal_factors(step, names)
        if not factors:
            continue
        sizes = [sum(micro["size"] for micro in row["micro"]) for row in step.rows]
        if _are_shares(factors, sizes):
            continue  # weighted by the ranks' shares of the batch, as it should be
        says = f"Step {step.iteration}: {combination(factors)[0].lower()}{combination(factors)[1:]}"
        calls = calls_of(step, GRADIENT)
        if absent := absent_from(factors):
            return [partial_average(fits, factors, absent, says)]
        clips = [_clip_before(row) for row in step.rows]
        if all(each is not None for each in clips):
            return []  # `judge_clip_order` explains it better
        place = where(calls[0]) if calls else step_place(fits)
        if len(step.rows[0]["micro"]) > 1 and not are_micro_batches(step.rows[0]):
            continue  # several losses of one batch may be combined by factors of their own
        if all(0 < factor <= 1 + NEAR for factor in factors):
            by_hand = "Each rank's part is scaled down by a factor of its own, as a clip by its own norm does."
            return [AuditFinding("clipped_before_average", (says, by_hand), place)]
        return [AuditFinding("unequal_weights", (says, f"Samples by rank: {', '.join(map(str, sizes))}."), place)]
    return []


def _unequal_factors(step: StepFits, names: Sequence[str]) -> tuple[float, ...]:
    """The factors by rank in what one rank applied to most tensors, if they differ; other ranks may apply other
    factors.

    They also differ if a rank applies another rank's gradient, which may apply its own.
    """
    kinds = (BY_RANK, BY_BOTH)
    tensors = [name for name in names if any(name in of_rank for of_rank in step.fits)]
    uneven = [name for name in tensors if any(name in of and of[name].kind in kinds for of in step.fits)]
    if len(uneven) * 2 <= len(tensors):
        return ()
    for of_rank in step.fits:
        factors = median_factors([each for each in of_rank.values() if each.kind in kinds])
        if factors and max(factors) - min(factors) > NEAR * max(map(abs, factors)):
            return factors
    return ()


def _are_shares(factors: Sequence[float], sizes: Sequence[int]) -> bool:
    if not all(sizes) or len(set(sizes)) < 2:
        return False
    ratios = [factor / size for factor, size in zip(factors, sizes, strict=True)]
    return max(ratios) - min(ratios) <= NEAR * max(map(abs, ratios))


def _clip_before(row: dict[str, Any]) -> dict[str, Any] | None:
    """The last micro-batch's clip before most of the gradients were sent; None without one."""
    last = len(row["micro"]) - 1
    events = [each for each in row["events"] if each["micro"] == last]
    calls = [each for each in events if each["kind"] == "call" and each["carries"] == GRADIENT]
    for clip in (each for each in events if each["kind"] == "clip"):
        before = sum(each["elements"] for each in calls if each["event"] < clip["event"])
        after = sum(each["elements"] for each in calls if each["event"] > clip["event"])
        if after > before:
            return clip
    return None


def _norms(clips: Sequence[dict[str, Any]]) -> str:
    norms = [f"rank {rank} {each['norm']:.3f}" for rank, each in enumerate(clips) if each["norm"] is not None]
    own = f", their own norms being {', '.join(norms)}" if norms else ""
    return f"the ranks clip to {clips[0]['limit']:g} before the gradients travel{own}."


def _stale(fits: Fits, known: Sequence[Fit]) -> list[AuditFinding]:
    stale = [each for each in known if each.kind in (STALE, OWN_STALE)]
    later = [step for step in fits.steps if any(row["before"] for row in step.rows)]
    if not stale or not later:
        return []
    factor = statistics.median(each.factors[0] for each in stale)
    tensors = max(len(row["before"]) for row in later[0].rows)
    says = (
        f"In {len(later)} of {fits.judged} judged steps {tensors} tensors had a gradient before the first backward "
        f"pass, and what is applied has {factor:.2f} times it in it."
    )
    return [AuditFinding("stale_gradients", (says,), step_place(fits))]
