"""The clock of an iteration: seconds by phase, by the host's clock or, on a GPU, by the stream that computes."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from cos598d.records.conventions import PHASES

Timestamp = Any  # the result of a timer's `now`, for that timer only


class Timer:
    """The host's clock, for a device that has done its work when a call returns. Timestamps are seconds."""

    is_at_once = True  # whether a timestamp is known as soon as it is taken

    def now(self) -> Timestamp:
        """A timestamp after everything that the device was given so far."""
        return time.perf_counter()

    def wait(self, timestamp: Timestamp) -> None:
        """Block the host until the device has reached `timestamp`."""

    def seconds(self, first: Timestamp, last: Timestamp) -> float:
        """Seconds between two timestamps, the earlier one first. The device must have reached both."""
        return last - first


class StreamTimer(Timer):
    """A CUDA device's current stream: a timestamp is when the device gets there, not when the host asks.

    `now` puts a timing event into the stream and returns. So a phase has the time of its own work and of what it waits
    for, not of other streams' work. Synchronizing the device instead would wait for all streams. It would add the time
    of a collective that overlaps backward to backward's time.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """

    is_at_once = False

    def __init__(self, device: torch.device):
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, timestamp: torch.cuda.Event) -> None:
        timestamp.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1e3


def timer_of(device: torch.device) -> Timer:
    """The timer of a device's work."""
    return StreamTimer(device) if device.type == "cuda" else Timer()


class IterationClock:
    """Seconds of one iteration and of its phases, summed over micro-batches. They are complete once it has stopped.

    `spans` has each part of a phase: its name, its begin in seconds since the iteration's, and its seconds. `began` is
    the iteration's begin as a timestamp of the device; `started` and `stopped` are its ends on the host, by
    time.perf_counter.

    A phase between two iterations, such as the copy for a checkpoint, counts for the next one: for its phases and
    seconds, but not its spans.

    On CUDA, phases are timed on the computing stream (`StreamTimer`), and the host waits for the device once per
    iteration, in `stop`. Host and device overlap there. What the host does while the device still has work is in no
    phase. The time in which the device waits for the host is in the phase whose work comes next.
    """

    def __init__(self, device: torch.device):
        self._time = timer_of(device)
        self.phases: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self.began: Timestamp = None
        self.started = self.stopped = 0.0
        self._stretches: list[tuple[str, Timestamp, Timestamp]] = []
        self._open: list[str] = []  # the phases that have begun, the innermost last
        self._since: Timestamp = None  # when the innermost went on
        self._before = 0  # how many of them are from before the iteration

    def start(self) -> None:
        """Begin a new iteration."""
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.spans = []
        self._before = len(self._stretches)
        self.began = self._time.now()
        self.started = self.began if self._time.is_at_once else time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose time counts for phase `name`, one of PHASES, except that of phases inside.

        The sync's phase lies inside backward, and inside the optimizer's step: the door begins it there.
        """
        self._interrupt()
        self._open.append(name)
        try:
            yield
        finally:
            self._interrupt()
            self._open.pop()

    def _interrupt(self) -> None:
        """Count what the innermost phase has taken since it went on."""
        now = self._time.now()
        if self._open:
            self._stretches.append((self._open[-1], self._since, now))
        self._since = now

    def stop(self) -> float:
        """Seconds since the iteration began, including the time between its phases; plus those of phases before it."""
        ended: Timestamp = self._time.now()
        self._time.wait(ended)
        self.stopped = ended if self._time.is_at_once else time.perf_counter()
        found = self._time.seconds(self.began, ended)
        for place, (name, first, last) in enumerate(self._stretches):
            seconds = self._time.seconds(first, last)
            self.phases[name] += seconds
            if place < self._before:
                found += seconds
            else:
                self.spans.append((name, self._time.seconds(self.began, first), seconds))
        self._stretches = []
        return found
