"""Seconds an iteration from what is computed, what is called and what the link carries. Pure functions.

A call of s steps, of which b bytes pass the busiest link one after another, m bytes are moved by a processor and k
bytes are read or written in memory that ranks share, takes

    work    = call_seconds + s step_seconds + m processor_seconds_per_byte + k memory_seconds_per_byte
    sending = b / (efficiency rate)                                                 of the link
    travel  = sending + (s + w) delay

where w counts delays that are waited for beside the steps': for words that a receiver is ready.

gloo's rings move their bytes in g segments, two at a time. A segment leaves when its receiver has said that it is
ready, so each pair of them takes two delays and the time of one segment, unless it takes longer to send both:

    travel  = sending + w delay + max(s delay, g/2 (2 delay - sending/g) - s step_seconds)

where the last term is what the processor is busy with anyway while that word travels. A long delay makes a ring of
many segments slow, whatever the rate.

After backward the calls follow one another: seconds = compute + sum of (work + travel).

Beside backward a call can begin when its gradients are there, the calls before it have begun, and fewer than AT_ONCE
are under way. Those under way share the link and the processor (`concurrent.py`). On a processor their work delays
backward by as much; a GPU has a processor beside it, which does not.

    seconds = before + max(backward + the work of the calls that begin in it, the last call's end) + after

Hosts of the emulated cluster share the machine's cores. With c ranks a core the core does the work of all c: m is c
times the mean over the ranks or, if that is more, what the busiest rank moves; calls and steps count c times.

A codec's own seconds, its arithmetic, are added where records tell them: they depend on the codec alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from cos598d.scale.concurrent import run_together
from cos598d.scale.records import Compute, Link
from cos598d.scale.rungs import ModelledCall


@dataclass(frozen=True)
class Costs:
    """What calls cost where each rank has a core of its own.

    codec_seconds: by a rung's label, what its codec computes in an iteration.
    """

    call_seconds: float
    step_seconds: float
    processor_seconds_per_byte: float
    efficiency: float
    memory_seconds_per_byte: float = 0.0
    codec_seconds: Mapping[str, float] = field(default_factory=dict)

    def crowded(self, crowd: float) -> "Costs":
        """The same where `crowd` ranks share a core, which does the work of all of them."""
        return replace(
            self,
            call_seconds=self.call_seconds * crowd,
            step_seconds=self.step_seconds * crowd,
            processor_seconds_per_byte=self.processor_seconds_per_byte * crowd,
        )


class CallArrays(NamedTuple):
    """An iteration's calls, each field an array over the calls; `ready` is in seconds from backward's begin."""

    ready: np.ndarray
    steps: np.ndarray
    link_bytes: np.ndarray
    moved_bytes: np.ndarray
    segments: np.ndarray
    waits: np.ndarray
    copied_bytes: np.ndarray


def arrange(calls: Sequence[ModelledCall], compute: Compute, crowd: float) -> CallArrays:
    """The calls as arrays, with the moments at which their gradients are there."""
    return CallArrays(
        np.array([max(compute.arrivals[name] for name in call.tensors) for call in calls], dtype=float),
        np.array([call.steps for call in calls], dtype=float),
        np.array([call.link_bytes for call in calls], dtype=float),
        np.array([max(call.mean_bytes, call.busiest_bytes / crowd) for call in calls], dtype=float),
        np.array([call.segments for call in calls], dtype=float),
        np.array([call.waits for call in calls], dtype=float),
        np.array([call.copied_bytes for call in calls], dtype=float),
    )


def iteration_seconds(
    label: str, calls: CallArrays, compute: Compute, link: Link, costs: Costs, overlaps: bool, steals: bool = True
) -> float:
    """Seconds of an iteration of the rung `label`; `steals`: its work takes the processor that computes.

    `costs` are those where as many ranks share a core as `calls` were arranged for.
    """
    codec = costs.codec_seconds.get(label, 0.0)
    if not len(calls.steps):
        return compute.seconds + codec
    work = costs.call_seconds + calls.steps * costs.step_seconds + calls.moved_bytes * costs.processor_seconds_per_byte
    work = work + calls.copied_bytes * costs.memory_seconds_per_byte
    sending = np.zeros_like(work)
    if link.rate is not None:
        sending = calls.link_bytes * 8 / (costs.efficiency * link.rate)
    idle = calls.segments / 2 * (2 * link.delay - sending / np.maximum(calls.segments, 1))
    travel = sending + calls.waits * link.delay
    travel = travel + np.maximum(calls.steps * link.delay, idle - calls.steps * costs.step_seconds)
    if not overlaps:
        return compute.seconds + codec + float((work + travel).sum())
    ended, computed = beside_backward(calls.ready, work, travel, sending, compute.backward, steals)
    return compute.before + max(compute.backward, ended, computed) + codec + compute.after


def beside_backward(
    ready: np.ndarray, work: np.ndarray, travel: np.ndarray, sending: np.ndarray, backward: float, steals: bool
) -> tuple[float, float]:
    """Seconds from backward's begin to the last call's end, and to backward's own.

    A call begins after those before it: not before the last of their gradients is there, and what their work has
    delayed it by.
    """
    begins = np.maximum.accumulate(ready) + (np.cumsum(work) - work if steals else 0.0)
    stolen = float(work[ready < backward].sum()) if steals else 0.0
    return run_together(begins.tolist(), work, travel, sending), backward + stolen


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
