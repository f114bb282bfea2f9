"""Seconds per iteration from compute, calls and links. Pure functions.

Consider a call of s steps. b bytes pass the busiest link one after another, and a CPU processes m bytes. k bytes are
read or written in memory that ranks share. The call takes

    work    = call_seconds + s step_seconds + m processor_seconds_per_byte + k memory_seconds_per_byte
    sending = b / (efficiency rate)                                                 of the link
    travel  = sending + (s + w) delay

where w counts delays in addition to those of the steps: for messages that a receiver is ready.

gloo's rings send their bytes in g segments, two at a time. A segment is sent when its receiver has reported that it is
ready. So each pair of them takes two delays and the time of one segment, unless sending both takes longer:

    travel  = sending + w delay + max(s delay, g/2 (2 delay - sending/g) - s step_seconds)

where the last term is the CPU time that overlaps with these reports. A long delay makes a ring of many segments slow,
whatever the rate.

After backward, calls run one after another: seconds = compute + sum of (work + travel).

During backward a call can start when its gradients are ready, the calls before it have started, and fewer than AT_ONCE
are running. Concurrent calls share the link and the CPU (`run_together`). On a CPU their work delays backward by as
much. On a GPU it does not, since the CPU does that work.

    seconds = before + max(backward + the work of the calls that begin in it, the last call's end) + after

Hosts of the emulated cluster share the machine's cores. With c ranks per core, the core does the work of all c, so
calls and steps count c times. m is the larger of c times the ranks' mean and the busiest rank's bytes.

A codec's own seconds, its arithmetic, are added if records contain them: they depend only on the codec.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from cos598d.records.quantities import delay_words, rate_words
from cos598d.sync.estimate import Load


@dataclass(frozen=True)
class Link:
    """A host's link to the others: bits per second each way (None: no known limit) and seconds from host to host."""

    rate: float | None = None
    delay: float = 0.0

    @property
    def words(self) -> str:
        """For tables: "1gbit, 10ms from host to host"."""
        rate = "unlimited rate" if self.rate is None else rate_words(self.rate)
        return rate + (f", {delay_words(self.delay)} from host to host" if self.delay else "")


@dataclass(frozen=True)
class Compute:
    """An iteration without any sync: seconds before backward, of backward, and after it.

    arrivals: seconds from backward's start to each tensor's gradient, by name.
    """

    before: float
    backward: float
    after: float
    arrivals: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        return self.before + self.backward + self.after

    def scaled(self, factor: float) -> "Compute":
        """The same with every time multiplied by `factor`."""
        moments = {name: seconds * factor for name, seconds in self.arrivals.items()}
        return Compute(self.before * factor, self.backward * factor, self.after * factor, moments)


@dataclass(frozen=True)
class ModelledCall(Load):
    """A collective call among ranks. It can start when `tensors`, by name, have their gradients."""

    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Costs:
    """The costs of calls if each rank has a core of its own.

    codec_seconds: by a sync's label, the seconds that its codec computes per iteration.
    """

    call_seconds: float
    step_seconds: float
    processor_seconds_per_byte: float
    efficiency: float
    memory_seconds_per_byte: float = 0.0
    codec_seconds: Mapping[str, float] = field(default_factory=dict)

    def crowded(self, crowd: float) -> "Costs":
        """The same if `crowd` ranks share a core, which does the work of all of them."""
        return replace(
            self,
            call_seconds=self.call_seconds * crowd,
            step_seconds=self.step_seconds * crowd,
            processor_seconds_per_byte=self.processor_seconds_per_byte * crowd,
        )


class CallArrays(NamedTuple):
    """An iteration's calls, each field an array over the calls. `ready` is in seconds from backward's start."""

    ready: np.ndarray
    steps: np.ndarray
    link_bytes: np.ndarray
    moved_bytes: np.ndarray
    segments: np.ndarray
    waits: np.ndarray
    copied_bytes: np.ndarray


def arrange(calls: Sequence[ModelledCall], compute: Compute, crowd: float) -> CallArrays:
    """The calls as arrays, with the times at which their gradients are ready."""
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
    """Seconds of an iteration of the sync `label`. `steals`: its work uses the processor that computes.

    `costs` must be for the same number of ranks per core as `calls` were arranged for.
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
    """Seconds from backward's start to the last call's end, and to backward's own end.

    A call starts after those before it, when the last of its gradients is ready, plus the delay that their work causes.
    """
    begins = np.maximum.accumulate(ready) + (np.cumsum(work) - work if steals else 0.0)
    stolen = float(work[ready < backward].sum()) if steals else 0.0
    return run_together(begins.tolist(), work, travel, sending), backward + stolen


def computes_by_batch(measured: Mapping[int, Compute], batch: int) -> tuple[Compute, float]:
    """The compute of a batch, and the fixed part of its seconds, from measurements of one or more batches.

    With one batch, all seconds grow with the examples. With several, a line through them gives the part that does not.
    Measured batches are returned unchanged.
    """
    nearest = min(measured, key=lambda known: abs(known - batch))
    fixed, per_example = 0.0, measured[nearest].seconds / nearest
    if len(measured) > 1:
        sizes = list(measured)
        per_example, fixed = np.polyfit(sizes, [measured[size].seconds for size in sizes], 1)
        if per_example <= 0 or fixed < 0:  # noise, between batches of similar size
            fixed, per_example = 0.0, measured[nearest].seconds / nearest
    if batch in measured:
        return measured[batch], float(fixed)
    factor = (fixed + per_example * batch) / measured[nearest].seconds
    return measured[nearest].scaled(float(factor)), float(fixed)


AT_ONCE = 2  # collectives that gloo works on at a time: a process group has this many threads; further ones wait


def run_together(
    begins: Sequence[float], work: np.ndarray, travel: np.ndarray, sending: np.ndarray, at_once: int = AT_ONCE
) -> float:
    """The time at which the last of the calls ends.

    begins: the earliest start of each call. They start in this order, when fewer than `at_once` are running. By itself
    a call takes work + travel seconds; it needs the processor for `work` of them, and the link for `sending` of them.
    Concurrent calls run at full speed until together they exceed the processor or the link. Then all slow down equally.
    """
    alone = work + travel
    of_processor, of_link = work / np.maximum(alone, 1e-12), sending / np.maximum(alone, 1e-12)
    now, first = 0.0, 0
    under_way: list[list[float]] = []  # seconds left when running by itself, and its shares of processor and link
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
