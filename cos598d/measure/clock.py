"""The clock of an iteration: seconds by phase."""

import contextlib
import time
from collections.abc import Iterator

import torch

PHASES = ("data", "forward", "backward", "sync", "clip", "step")


class IterationClock:
    """Seconds of one iteration and of its phases, summed over micro-batches.

    `spans` has each stretch of a phase by itself: its name, when it began in seconds since the iteration did, and
    its seconds; `started` is the iteration's beginning on time.perf_counter's clock.

    On CUDA every reading waits for the device first: kernels run after the call that launched them has returned.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.phases: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self.started = 0.0

    def start(self) -> None:
        """A new iteration begins."""
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.spans = []
        self.started = self._now()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs in this context belongs to phase `name`, one of PHASES."""
        started = self._now()
        yield
        seconds = self._now() - started
        self.phases[name] += seconds
        self.spans.append((name, started - self.started, seconds))

    def stop(self) -> float:
        """Seconds since the iteration began: its phases and what lies between them."""
        return self._now() - self.started

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
