"""The clock of an iteration: seconds by phase."""

import contextlib
import time
from collections.abc import Iterator

import torch

from cos598d.comm.timers import Timestamp, timer_of
from cos598d.records.conventions import PHASES


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
        """A context whose time counts for phase `name`, one of PHASES."""
        began = self._time.now()
        yield
        self._stretches.append((name, began, self._time.now()))

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
