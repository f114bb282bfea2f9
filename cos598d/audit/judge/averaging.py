"""Faults of averaging: what the fits' factors and the order of the calls say of how gradients were combined."""

import statistics
from collections.abc import Sequence
from typing import Any

from cos598d.audit.book import Book
from cos598d.audit.contents import GATHER, GRADIENT, REDUCE, WEIGHT
from cos598d.audit.judge.fit import BY_RANK, INDISTINCT, MEAN, NEAR, OWN, OWN_STALE, STALE, UNKNOWN, Fit
from cos598d.audit.judge.gradients import Fits, StepFits, most_common
from cos598d.audit.judge.parts import judge_parts
from cos598d.audit.judge.verdict import Finding, Where, where


def judge_averaging(books: Sequence[Book], fits: Fits) -> list[Finding]:
    """The faults of one group of ranks, causes alone: of several that explain the same only the first."""
    if len(books) < 2 or not fits.steps:
        return []
    by_tensor: dict[str, list[list[Fit]]] = {}  # by name: of every rank, in all steps
    for step in fits.steps:
        for place, of_rank in enumerate(step.fits):
            for name, each in of_rank.items():
                by_tensor.setdefault(name, [[] for _ in books])[place].append(each)
    kinds = {name: [most_common(each) for each in ranks] for name, ranks in by_tensor.items()}
    own = [name for name, each in kinds.items() if all(kind in (OWN, OWN_STALE) for kind in each)]
    own = [name for name in own if not _is_apart_by_design(books, name)]
    # A tensor that one rank alone steps is that rank's: the others need no average of it.
    at_root = [name for name in kinds if all(by_tensor[name]) and _is_at_root(kinds[name], _only_to_one(fits))]
    told = [name for name, each in kinds.items() if any(kind not in ("small", "unknown") for kind in each)]
    found: list[Finding] = []
    if at_root and len(at_root) >= len(own):
        found.append(_not_scattered(fits, at_root, kinds))
    elif own and len(own) == len(told):
        found.append(_alone(books, fits, len(own)))
    elif own:
        found.append(_forgotten(fits, own, len(told)))
    rest = [each for name, ranks in by_tensor.items() if name not in own for of_rank in ranks for each in of_rank]
    found += _by_rank(books, fits, rest) or _scaled(books, fits, rest)
    return found + _stale(fits, [each for ranks in by_tensor.values() for of_rank in ranks for each in of_rank])


def judge_clip_order(books: Sequence[Book], fits: Fits) -> list[Finding]:
    """Clips that come before the gradients travel, also where they did nothing in the steps that were seen."""
    for step in fits.steps:
        if most_common(step.known()) not in (MEAN, BY_RANK, INDISTINCT):
            continue
        places = [_clip_before(row) for row in step.rows]
        clips = [each for each in places if each is not None]
        if len(clips) < len(step.rows):
            continue
        factors = median_factors([each for each in step.known() if each.kind == BY_RANK])
        said = [_norms(clips)]
        if factors:
            said.append(_combination(factors))
        else:
            said.append("It did nothing in this step, for every norm was under the limit: it will where one is above.")
        return [Finding("clipped_before_average", (f"Step {step.iteration}: {said[0]}", *said[1:]), where(clips[0]))]
    return []


def _is_at_root(kinds: Sequence[str], to_one: bool) -> bool:
    """Whether one rank alone has the average. A reduce leaves on the others what came by there."""
    others = kinds.count(OWN) + (kinds.count(UNKNOWN) if to_one else 0)
    return kinds.count(MEAN) == 1 and others == len(kinds) - 1


def _is_apart_by_design(books: Sequence[Book], name: str) -> bool:
    """Whether a weight that is whole beside others that are cut differs between ranks from the start: a rank's own."""
    begun = {book["start"].get("weights", {}).get(name) for book in books}
    return len(begun) > 1 and any(book["model"].get("sharded") for book in books)


def _only_to_one(fits: Fits) -> bool:
    calls = _calls(fits.steps[0], GRADIENT)
    return bool(calls) and all(each["op"] in (GATHER, REDUCE) for each in calls)


def _calls(step: StepFits, carries: str, rank: int = 0) -> list[dict[str, Any]]:
    return [each for each in step.rows[rank]["events"] if each["kind"] == "call" and each["carries"] == carries]


def _step_place(fits: Fits) -> Where:
    row = fits.steps[0].rows[0]
    steps = [each for each in row["events"] if each["kind"] == "step"]
    if steps:
        return where(steps[0])
    return where(row["micro"][0]) if row["micro"] else ("", 0, "")


def _residual(fits: Sequence[Fit]) -> str:
    return f"{max((each.residual for each in fits), default=0.0):.0e}"


def _alone(books: Sequence[Book], fits: Fits, tensors: int) -> Finding:
    """Every rank applies its own gradient: why."""
    known = [each for step in fits.steps for each in step.known() if each.kind == OWN]
    says = (
        f"In {fits.judged} of {fits.judged} judged steps the gradient that each rank applied to each of {tensors} "
        f"tensors is its own (left over: {_residual(known)} of it)."
    )
    is_cut = any(book["model"].get("sharded") for book in books)  # then weights are gathered, and not averaged
    ledger = [] if is_cut else books[0]["ledger"]
    weights = [entry for entry in ledger if entry["kind"] == WEIGHT and entry["first_iteration"] >= 1]
    seen = books[0]["iterations_seen"]
    if weights:
        calls = sum(entry["calls"] for entry in weights)
        most = max(entry["calls"] for entry in weights)
        name = "weights_averaged" if most >= 0.9 * max(seen - 1, 1) else "local_steps"
        travel = f"Weights travel instead, in {calls} calls of {seen} steps ({weights[0]['op']})."
        return Finding(name, (says, travel), where(weights[0]))
    calls = _calls(fits.steps[0], GRADIENT)
    if calls:
        moved = f"{len(calls)} calls of {calls[0]['op']} carried gradients in step {fits.steps[0].iteration}."
        return Finding("result_dropped", (says, moved), where(calls[-1]))
    return Finding("never_averaged", (says, "No call carried a gradient."), _step_place(fits))


def _not_scattered(fits: Fits, names: Sequence[str], kinds: dict[str, list[str]]) -> Finding:
    root = kinds[names[0]].index(MEAN)
    others = [rank for rank in range(len(kinds[names[0]])) if rank != root]
    says = (
        f"On rank {root} the average of all ranks is applied to {len(names)} tensors, "
        f"on rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} it is not."
    )
    calls = [each for each in _calls(fits.steps[0], GRADIENT) if each["op"] in (GATHER, REDUCE)]
    calls = calls or _calls(fits.steps[0], GRADIENT)
    return Finding("not_scattered", (says,), where(calls[-1]) if calls else _step_place(fits))


def _forgotten(fits: Fits, names: Sequence[str], tensors: int) -> Finding:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    says = f"{len(names)} of {tensors} tensors are stepped by each rank's own gradient: {shown}."
    calls = _calls(fits.steps[0], GRADIENT)
    return Finding("forgotten_tensors", (says,), where(calls[-1]) if calls else _step_place(fits))


def median_factors(fits: Sequence[Fit]) -> tuple[float, ...]:
    """The factors of several tensors as one."""
    if not fits:
        return ()
    count = len(fits[0].factors)
    alike = [each for each in fits if len(each.factors) == count]
    return tuple(statistics.median(each.factors[place] for each in alike) for place in range(count))


def _combination(factors: Sequence[float]) -> str:
    ranks = len(factors)
    parts = " + ".join(f"{factor / ranks:.3f} g{place}" for place, factor in enumerate(factors))
    return f"The applied gradient is {parts}, where an average is {1 / ranks:.3f} of each."


def _by_rank(books: Sequence[Book], fits: Fits, known: Sequence[Fit]) -> list[Finding]:
    """What ranks' factors that differ come from."""
    if most_common(known) != BY_RANK:
        return []
    for step in fits.steps:
        factors = _unequal_factors(step)
        if not factors:
            continue
        sizes = [sum(micro["size"] for micro in row["micro"]) for row in step.rows]
        if _are_shares(factors, sizes):
            continue  # weighted by the ranks' shares of the batch, as it should be
        says = f"Step {step.iteration}: {_combination(factors)[0].lower()}{_combination(factors)[1:]}"
        clips = [_clip_before(row) for row in step.rows]
        if all(each is not None for each in clips):
            return []  # `judge_clip_order` tells more of it
        calls = _calls(step, GRADIENT)
        place = where(calls[0]) if calls else _step_place(fits)
        absent = [rank for rank, factor in enumerate(factors) if abs(factor) <= NEAR]
        if absent:
            there = [rank for rank in range(len(factors)) if rank not in absent]
            who = f"Of ranks {', '.join(map(str, absent))} nothing is in it, only of {', '.join(map(str, there))}."
            return [Finding("partial_average", (says, who), place)]
        if all(0 < factor <= 1 + NEAR for factor in factors):
            by_hand = "Each rank's part is scaled down by a factor of its own, as a clip by its own norm does."
            return [Finding("clipped_before_average", (says, by_hand), place)]
        return [Finding("unequal_weights", (says, f"Samples by rank: {', '.join(map(str, sizes))}."), place)]
    return []


def _unequal_factors(step: StepFits) -> tuple[float, ...]:
    """The factors by rank of what one rank applied, where they differ: another group's may be others."""
    for of_rank in step.fits:
        factors = median_factors([each for each in of_rank.values() if each.kind == BY_RANK])
        if factors and max(factors) - min(factors) > NEAR * max(map(abs, factors)):
            return factors
    return ()


def _are_shares(factors: Sequence[float], sizes: Sequence[int]) -> bool:
    if not all(sizes) or len(set(sizes)) < 2:
        return False
    ratios = [factor / size for factor, size in zip(factors, sizes, strict=True)]
    return max(ratios) - min(ratios) <= NEAR * max(map(abs, ratios))


def _scaled(books: Sequence[Book], fits: Fits, known: Sequence[Fit]) -> list[Finding]:
    """A sum where there should be a mean, a mean of a mean, and a common gradient that ranks scale differently."""
    ranks = len(books)
    divided: list[Finding] = []
    for step in fits.steps:
        by_rank = [[each.factor for each in of.values() if each.kind in (MEAN, INDISTINCT)] for of in step.fits]
        if not all(by_rank):
            continue
        factors = [statistics.median(each) for each in by_rank]
        place = where(_calls(step, GRADIENT)[-1]) if _calls(step, GRADIENT) else _step_place(fits)
        middle = statistics.median(factors)
        if max(factors) - min(factors) > NEAR * abs(middle):
            if any(row["places"] for row in step.rows):
                return judge_parts(step, _step_place(fits))
            said = ", ".join(f"rank {rank} {factor:.3f}" for rank, factor in enumerate(factors))
            says = f"Step {step.iteration}: all ranks have the average, and apply different multiples of it: {said}."
            return [Finding("different_gradients", (says,), _step_place(fits))]
        weights = [micro["weight"] for micro in step.rows[0]["micro"]]
        clipped = _clip_factor(step)
        factor = middle / clipped
        whole = sum(weight for weight in weights if weight is not None) if None not in weights else None
        if near(factor, 1) or (whole and near(factor * whole, 1)):
            continue
        is_known = whole is not None
        as_one = factor * (whole if whole is not None else 1.0)
        each_is_one = is_known and near(factor * (weights[0] or 0.0), 1)
        says = f"Step {step.iteration}: the applied gradient is {middle:.4g} times the average of {ranks} ranks."
        if is_known and not each_is_one and (near(as_one, ranks) or near(factor, ranks)):
            return [Finding("summed", (says,), place)]
        if is_known and (near(as_one, 1 / ranks) or near(factor, 1 / ranks)) and clipped == 1:
            divided.append(Finding("averaged_twice", (says,), place))
    # A clip by hand may come near it in one step, and not in all.
    return divided[:1] if len(divided) == len(fits.steps) else []


def near(value: float, other: float) -> bool:
    """Whether two factors are the same."""
    return abs(value - other) <= NEAR * abs(other)


def _clip_factor(step: StepFits) -> float:
    """What a clip by torch's function after the gradients had travelled made of them."""
    row = step.rows[0]
    calls = [each["event"] for each in _calls(step, GRADIENT)]
    factor = 1.0
    for event in row["events"]:
        if event["kind"] != "clip" or event["how"] != "norm" or event["event"] < max(calls, default=0):
            continue
        if event["factor"] is not None:
            factor *= event["factor"]
        elif event["norm"]:
            factor *= min(1.0, event["limit"] / (event["norm"] + 1e-6))
    return factor


def _clip_before(row: dict[str, Any]) -> dict[str, Any] | None:
    """The clip of the last micro-batch that comes before most of the gradients have travelled, if there is one."""
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


def _stale(fits: Fits, known: Sequence[Fit]) -> list[Finding]:
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
    return [Finding("stale_gradients", (says,), _step_place(fits))]
