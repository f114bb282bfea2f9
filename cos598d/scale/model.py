"""Seconds an iteration from what is computed, what is called and what the link carries. Pure functions.

A call of s steps, of which b bytes pass the busiest link one after another and m bytes are moved by a processor, takes

    work   = call_seconds + s step_seconds + m processor_seconds_per_byte        of the processor
    travel = s delay + stretch b / (efficiency rate)                             of the link

gloo's all-reduce moves its bytes in g segments, two at a time. A segment leaves when its receiver has said that it is
ready, so each pair of them takes two delays and the time of one segment, unless it takes longer to send both:

    sending = stretch b / (efficiency rate)
    travel  = sending + max(s delay, g/2 (2 delay - sending/g) - s step_seconds)

where the last term is what the processor is busy with anyway while that word travels. A long delay makes a ring of
many segments slow, whatever the rate.

Hosts of the emulated cluster share the machine's cores: with c ranks a core, m is the mean over the ranks or, if that
is more, a c-th of what the busiest rank moves, which may have a core for itself while others wait.

After backward the calls follow one another: seconds = compute + sum of (work + travel) + own.

Beside backward call j can begin when its gradients are there, r_j, and the call before has ended. On a processor its
work delays backward by as much (a GPU has a processor beside it, which does not):

    R_j = r_j + the work of the calls before j
    e_j = max(e_(j-1), R_j) + work_j + travel_j,        e_0 = 0
    seconds = before + max(backward + the work of the calls that begin in it, e_last) + after + own

own and stretch are a rung's: the seconds that it spends on itself (copies, sums, a codec), whatever the link, and how
much longer its bytes take than that path says. They are 0 and 1 where too little was measured to tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cos598d.scale.records import Compute, Link
from cos598d.scale.rungs import Call


@dataclass(frozen=True)
class Costs:
    """What is fitted: of all rungs, and by a rung's label its own seconds and the stretch of its bytes' travel."""

    call_seconds: float
    step_seconds: float
    processor_seconds_per_byte: float
    efficiency: float
    own_seconds: Mapping[str, float] = field(default_factory=dict)
    stretch: Mapping[str, float] = field(default_factory=dict)


class Calls(NamedTuple):
    """An iteration's calls, each field an array over the calls; `ready` is in seconds from backward's begin."""

    ready: np.ndarray
    steps: np.ndarray
    link_bytes: np.ndarray
    moved_bytes: np.ndarray
    segments: np.ndarray


def arrange(calls: Sequence[Call], compute: Compute, crowd: float) -> Calls:
    """The calls as arrays, with the moments at which their gradients are there."""
    return Calls(
        np.array([max(compute.arrivals[name] for name in call.tensors) for call in calls], dtype=float),
        np.array([call.steps for call in calls], dtype=float),
        np.array([call.link_bytes for call in calls], dtype=float),
        np.array([max(call.mean_bytes, call.busiest_bytes / crowd) for call in calls], dtype=float),
        np.array([call.segments for call in calls], dtype=float),
    )


def iteration_seconds(
    label: str, calls: Calls, compute: Compute, link: Link, costs: Costs, overlaps: bool, steals: bool = True
) -> float:
    """Seconds of an iteration of the rung `label`; `steals`: its work takes the processor that computes."""
    if not len(calls.steps):
        return compute.seconds
    work = costs.call_seconds + calls.steps * costs.step_seconds + calls.moved_bytes * costs.processor_seconds_per_byte
    sending = np.zeros_like(work)
    if link.rate is not None:
        sending = costs.stretch.get(label, 1.0) * calls.link_bytes * 8 / (costs.efficiency * link.rate)
    idle = calls.segments / 2 * (2 * link.delay - sending / np.maximum(calls.segments, 1))
    travel = sending + np.maximum(calls.steps * link.delay, idle - calls.steps * costs.step_seconds)
    own = costs.own_seconds.get(label, 0.0)
    if not overlaps:
        return compute.seconds + max(0.0, float((work + travel).sum()) + own)
    ended, computed = overlapped(calls.ready, work, travel, compute.backward, steals)
    return compute.before + max(compute.backward, max(ended, computed) + own) + compute.after


def overlapped(
    ready: np.ndarray, work: np.ndarray, travel: np.ndarray, backward: float, steals: bool
) -> tuple[float, float]:
    """Seconds from backward's begin to the last call's end, and to backward's own.

    The recursion of e_j, unrolled: the last call ends after some call i began on time and all from it on without
    a pause, e = max over i of R_i + (work + travel) from i to the last.
    """
    begins = ready + (np.cumsum(work) - work if steals else 0.0)
    lengths = work + travel
    from_here = np.cumsum(lengths[::-1])[::-1]
    stolen = float(work[ready < backward].sum()) if steals else 0.0
    return float((begins + from_here).max()), backward + stolen


def computes_by_batch(measured: Mapping[int, Compute], batch: int) -> tuple[Compute, float]:
    """The compute of a batch, and the fixed part of its seconds, from what was measured of one or more batches.

    Of one batch all seconds grow with the examples; of several a line through them tells the part that does not. What
    was measured is returned as it is.
    """
    nearest = min(measured, key=lambda known: abs(known - batch))
    fixed, per_example = 0.0, measured[nearest].seconds / nearest
    if len(measured) > 1:
        sizes = list(measured)
        per_example, fixed = np.polyfit(sizes, [measured[size].seconds for size in sizes], 1)
        if per_example <= 0 or fixed < 0:  # noise, between batches that lie too close
            fixed, per_example = 0.0, measured[nearest].seconds / nearest
    if batch in measured:
        return measured[batch], float(fixed)
    factor = (fixed + per_example * batch) / measured[nearest].seconds
    return measured[nearest].scaled(float(factor)), float(fixed)
