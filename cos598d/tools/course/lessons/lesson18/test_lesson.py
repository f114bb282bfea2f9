"""Lesson 18, read a trace: fault, rank, call and seconds in runs that are drawn each time, and in a real recording."""

import math
import random
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

from cos598d.tools.course.lessons.lesson18.recording import SLOW_LAYER, SLOW_RANK, SLOW_SECONDS, recorded
from cos598d.tools.course.lessons.lesson18.simulator import (
    BACKWARD,
    BLOCKING,
    FAULTS,
    FORWARD,
    LATE,
    NONE,
    SMALL,
    STARVED,
    STRAGGLER,
    VARIANTS,
    Trace,
    TraceFault,
    drawn,
)

WITHIN = 0.15
ANSWER = ("fault", "rank", "call", "seconds")
WHY = {
    LATE: "rank {rank} begins '{call}' only after backward",
    BLOCKING: "rank {rank} waits in '{call}' during backward, and computes nothing meanwhile",
    STARVED: "rank {rank} waits for its batch {ms:.1f} ms longer than the others in each step",
    STRAGGLER: "'{call}' takes rank {rank} {ms:.1f} ms longer than the others in each step",
    SMALL: "each step makes a call for every tensor, on all ranks",
    NONE: "no region is longer on one rank than on the others in most steps",
}


def runs(seed: int) -> list[tuple[list[Trace], TraceFault]]:
    """Three runs of every kind in any order, each as its traces and its fault."""
    draw = random.Random(seed)
    kinds = [(kind, variant) for kind in FAULTS for variant in VARIANTS]
    draw.shuffle(kinds)
    return [drawn(draw.getrandbits(32), *each) for each in kinds]


def of_drawn(comm: Any, module: Any, seed: int) -> list[Any]:
    """On a rank: what the file's diagnose finds in drawn runs."""
    return [module.diagnose(traces) for traces, _ in runs(seed)]


def of_recording(comm: Any, module: Any) -> Any:
    """On a rank: what it finds in the recording."""
    return module.diagnose(recorded())


def test_reads_drawn_runs(ranks, seed, n):
    """In 18 runs that are drawn each time diagnose names the fault, its rank, its call, and its seconds within 15 %."""
    world = ranks(n, of_drawn, seed)
    tried = enumerate(zip(world.values[0], runs(seed), strict=True), 1)
    for number, (found, (traces, fault)) in sorted(tried, key=lambda run: FAULTS.index(run[1][1][1].kind)):
        words = wrong_diagnosis(found, fault, traces)
        world.require(not words, f"run {number}, of {len(traces)} ranks: {words}", about="diagnose")


def test_reads_a_recording(ranks, seed, n):
    """In a real recording of three processes diagnose names the fault, its rank, its call and its seconds."""
    world = ranks(n, of_recording)
    words = wrong_diagnosis(world.values[0], TraceFault(STRAGGLER, SLOW_RANK, SLOW_LAYER, SLOW_SECONDS), recorded())
    world.require(not words, f"the recording: {words}", about="diagnose")


def wrong_diagnosis(found: Any, right: TraceFault, traces: list[Trace]) -> str:
    """What is wrong with what diagnose returned, in words; "" if nothing is."""
    if not isinstance(found, Mapping) or not set(ANSWER) <= set(found):
        return f"diagnose returned {found!r:.200}, expected a dictionary with {', '.join(ANSWER)}"
    kind, rank, call, seconds = (found[name] for name in ANSWER)
    why = WHY[right.kind].format(rank=right.rank, call=right.call, ms=1e3 * right.seconds)
    if kind != right.kind:
        of = f" on rank {rank}" if rank is not None else ""
        victim = kind == STRAGGLER and right.rank not in (None, rank) and right.kind != STRAGGLER
        more = ". A rank that waits is not slow: look for what it waits for" if victim else ""
        more = more or about_call(call, rank, right, traces)
        return f"your fault is {kind!r}{of}, expected {right.kind!r}: {why}{more}"
    if right.kind == NONE:
        return ""
    if rank != right.rank:
        place = next((p for p, trace in enumerate(traces) if trace["distributedInfo"]["rank"] == right.rank), None)
        listed = rank == place and place is not None
        more = ". The list is in any order: the rank is in distributedInfo" if listed else ""
        return f"{right.kind} of rank {rank}, expected rank {right.rank}: {why}{more}"
    if call != right.call:
        return f"{right.kind} in {call!r}, expected {right.call!r}: {why}{about_call(call, rank, right, traces)}"
    if type(seconds) not in (int, float) or not math.isfinite(seconds):
        return f"{right.kind}: seconds are {seconds!r}, expected a number"
    if abs(seconds - right.seconds) <= WITHIN * right.seconds:
        return ""
    return f"{right.kind} of {seconds:.6g} s, expected {right.seconds:.5f} s{slip(seconds, right, traces)}"


def about_call(call: Any, rank: Any, right: TraceFault, traces: list[Trace]) -> str:
    """What speaks against a call that was named instead, in words; "" if nothing is known."""
    if call in (FORWARD, BACKWARD):
        return f". '{call}' contains other regions: leave it out"
    if call == right.call and right.kind == BLOCKING:
        return ". A region in which a call begins contains c10d::allreduce_, whatever its name is"
    found = lengths(traces, call) if right.kind == NONE and isinstance(call, str) else {}
    others = [median(each) for other, each in found.items() if other != rank]
    if rank not in found or not others:
        return ""
    ms = 1e3 * (median(found[rank]) - median(others))
    return f". The median of '{call}' on rank {rank} differs from that of the others by {ms:.2f} ms"


def lengths(traces: list[Trace], name: str) -> dict[int, list[float]]:
    """The lengths in seconds of the events of that name, by rank."""
    found = {}
    for trace in traces:
        each = [event["dur"] / 1e6 for event in trace["traceEvents"] if event["name"] == name and "dur" in event]
        if each:
            found[trace["distributedInfo"]["rank"]] = each
    return found


def slip(seconds: float, right: TraceFault, traces: list[Trace]) -> str:
    """What the seconds are instead, in words."""
    steps = sum(event["name"].startswith("ProfilerStep") for event in traces[0]["traceEvents"])
    for factor, words in ((1e6, "these are microseconds"), (1e3, "these are milliseconds"), (1e-3, "divide by 1e6")):
        if abs(seconds / factor / right.seconds - 1) <= WITHIN:
            return f": {words}"
    of_all_steps = ": the first step is slower than the others on every rank, so take the median over the steps"
    is_excess, is_more = right.kind in (STARVED, STRAGGLER, BLOCKING), seconds > right.seconds
    if is_excess:
        found = lengths(traces, right.call or "")
        own, others = found.pop(right.rank or 0), list(found.values())
        medians = [median(each) for each in others]
        ways = {of_all_steps: mean(own) - median(map(mean, others))}
        ways[": that is its whole length, expected what it takes more than on the other ranks"] = median(own)
        for of, other in (("mean", mean(medians)), ("fastest", min(medians)), ("slowest", max(medians))):
            ways[f": that is the excess over the {of} of the other ranks: take their median"] = median(own) - other
        words = min(ways, key=lambda way: abs(ways[way] - seconds))
        if abs(ways[words] - seconds) <= 0.02 * seconds:
            return words
    if abs(seconds / steps / right.seconds - 1) <= 2 * WITHIN:
        return f": that is the sum of {steps} steps, expected what each costs"
    if is_excess and is_more:
        return of_all_steps
    if right.kind == SMALL and is_more:
        words = "one call costs as much as the shortest call of the step, which sends almost nothing"
        return f": {words}; take neither the median nor the sum of their lengths"
    return ": take off the last call's own length" if right.kind == LATE and is_more else ""
