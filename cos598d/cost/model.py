"""Seconds per iteration from what is computed, what is called and what the link carries. Pure functions.

A call of s steps, of which b bytes pass the busiest link one after another, m bytes are moved by a processor and k
bytes are read or written in memory that ranks share, takes

    work    = call_seconds + s step_seconds + m processor_seconds_per_byte + k memory_seconds_per_byte
    sending = b / (efficiency rate)                                                 of the link
    travel  = sending + (s + w) delay

where w counts delays that are waited for next to the steps': for words that a receiver is ready.

gloo's rings move their bytes in g segments, two at a time. A segment leaves when its receiver has said that it is
ready, so each pair of them takes two delays and the time of one segment, unless it takes longer to send both:

    travel  = sending + w delay + max(s delay, g/2 (2 delay - sending/g) - s step_seconds)

where the last term is what the processor is busy with anyway while that word travels. A long delay makes a ring of
many segments slow, whatever the rate.

After backward the calls follow one another: seconds = compute + sum of (work + travel).

During backward a call can begin when its gradients are there, the calls before it have begun, and fewer than AT_ONCE
are under way. Those under way share the link and the processor (`run_together`). On a processor their work delays
backward by as much; a GPU has a processor next to it, which does not.

    seconds = before + max(backward + the work of the calls that begin in it, the last call's end) + after

Hosts of the emulated cluster share the machine's cores. With c ranks a core the core does the work of all c: m is c
times the mean over the ranks or, if that is more, what the busiest rank moves; calls and steps count c times.

A codec's own seconds, its arithmetic, are added where records tell them: they depend on the codec alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from cos598d.records.quantities import delay_words, rate_words
from cos598d.sync.cost import Load


@dataclass(frozen=True)
class Link:
    """A host's link to the others: bits per second each way (None: no limit known) and seconds from host to host."""

    rate: float | None = None
    delay: float = 0.0

    @property
    def words(self) -> str:
        """For tables: "1gbit, 10ms from host to host"."""
        rate = "no limit" if self.rate is None else rate_words(self.rate)
        return rate + (f", {delay_words(self.delay)} from host to host" if self.delay else "")


@dataclass(frozen=True)
class Compute:
    """An iteration without any sync: seconds until backward begins, of backward, and after it.

    arrivals: seconds from backward's begin to each tensor's gradient, by name.
    """

    before: float
    backward: float
    after: float
    arrivals: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of the whole iteration."""
        return self.before + self.backward + self.after

    def scaled(self, factor: float) -> "Compute":
        """The same with every moment `factor` times as late."""
        moments = {name: seconds * factor for name, seconds in self.arrivals.items()}
        return Compute(self.before * factor, self.backward * factor, self.after * factor, moments)


@dataclass(frozen=True)
class ModelledCall(Load):
    """A collective call among ranks; it can begin when `tensors`, by their names, have their gradients."""

    tensors: tuple[str, ...] = ()


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


AT_ONCE = 2  # collectives that gloo works on at a time: a process group has so many threads; further ones wait in line


def run_together(
    begins: Sequence[float], work: np.ndarray, travel: np.ndarray, sending: np.ndarray, at_once: int = AT_ONCE
) -> float:
    """When the last of the calls ends.

    begins: the moment from which each may begin; they begin in their order, each when fewer than `at_once` are under
    way. Alone a call takes work + travel seconds; for `work` of them it needs the processor, for `sending` of them the
    link. Those under way go on at full speed as long as they need no more than the whole of either; else all of them as
    much slower.
    """
    alone = work + travel
    of_processor, of_link = work / np.maximum(alone, 1e-12), sending / np.maximum(alone, 1e-12)
    now, first = 0.0, 0
    under_way: list[list[float]] = []  # seconds left, alone, and the shares of processor and link that it needs
    while first < len(begins) or under_way:
        while first < len(begins) and len(under_way) < at_once and begins[first] <= now:
            under_way.append([float(alone[first]), float(of_processor[first]), float(of_link[first])])
            first += 1
        if not under_way:
            now = begins[first]
            continue
        slower = max(1.0, sum(call[1] for call in under_way), sum(call[2] for call in under_way))
        passed = min(call[0] for call in under_way) * slower
        if first < len(begins) and len(under_way) < at_once:
            passed = min(passed, begins[first] - now)
        now += passed
        for call in under_way:
            call[0] -= passed / slower
        under_way = [call for call in under_way if call[0] > 1e-12]
    return now
