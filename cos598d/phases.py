"""The phases of an iteration: an inner one interrupts the outer, so that no second counts twice."""

import contextlib
from collections.abc import Iterator

from cos598d.measure.clock import IterationClock


class Phases:
    """Seconds by phase, on an iteration's clock: `with phases("forward"):`.

    The sync's phase lies inside backward, and inside the optimizer's step: the door begins it there (`Parallel.phase`).
    """

    def __init__(self, clock: IterationClock):
        self._clock, self._names, self._running = clock, list[str](), contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context whose time counts for phase `name`, except that of phases inside."""
        self._names.append(name)
        self._switch()
        try:
            yield
        finally:
            self._names.pop()
            self._switch()

    def _switch(self) -> None:
        """End the phase that is counted, and count the innermost."""
        self._running.close()
        if self._names:
            self._running.enter_context(self._clock.phase(self._names[-1]))
