"""The clock of an iteration: seconds by phase."""

import contextlib
import time
from collections.abc import Iterator

import torch

from cos598d.comm.timers import Timestamp, timer_of
from cos598d.records.conventions import PHASES


class IterationClock:
    """Seconds of one iteration and of its phases, summed over micro-batches. They are there once it has stopped.

    `spans` has each stretch of a phase by itself: its name, when it began in seconds since the iteration did, and
    its seconds. `began` is the iteration's beginning as a moment of the device's work; `started` and `stopped` are its
    ends on the host, on time.perf_counter's clock.

    A phase between two iterations, such as the copy for a checkpoint, is added to the next one's: to its phases and
    to its seconds, and not to its spans.

    On CUDA phases are told apart on the stream that computes (`StreamTimer`), and the host waits for the device once an
    iteration, in `stop`. Host and device run side by side there: what the host does while the device still has
    work is in no phase, and while the device waits for the host it is in the phase whose work comes next.
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
        """A new iteration begins."""
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.spans = []
        self._before = len(self._stretches)
        self.began = self._time.now()
        self.started = self.began if self._time.is_at_once else time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs in this context belongs to phase `name`, one of PHASES."""
        began = self._time.now()
        yield
        self._stretches.append((name, began, self._time.now()))

    def stop(self) -> float:
        """Seconds since the iteration began: its phases and what lies between them; and of phases before it."""
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
