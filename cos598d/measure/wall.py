"""Wall time of training: the clocks of the iterations, and what lies between them, such as recording."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cos598d.records.conventions import WARM_UP


class WallTime:
    """The host's time from the begin of training to its end, evaluations left out, beside the clock's."""

    def __init__(self) -> None:
        self._last = 0.0
        self._is_running = False
        self._iterations = 0
        # Of the epoch so far, and of the run after its warm-up.
        self._epoch, self._run = _WallSums(), _WallSums()

    def begin(self) -> None:
        """Training begins, or goes on after an evaluation; nothing changes where it runs."""
        if not self._is_running:
            self._last, self._is_running = time.perf_counter(), True

    def lap(self, seconds: float, examples: int, counts: Mapping[str, int] | None = None) -> float:
        """An iteration has ended, of so many seconds by its clock and so many examples, which come to `counts` (such as
        tokens); return the wall's seconds since the iteration before had."""
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        self._iterations += 1
        self._epoch.add(lap, seconds, examples, counts or {})
        if self._iterations > WARM_UP:
            self._run.add(lap, seconds, examples, counts or {})
        return lap

    def end(self) -> None:
        """Training pauses: what came after its last iteration belongs to the epoch too."""
        now = time.perf_counter()
        self._epoch.wall += now - self._last
        self._is_running = False

    def epoch(self) -> dict[str, float | None]:
        """End an epoch: its examples, its seconds by the clocks of its iterations and by the wall, and both rates; and
        what the examples came to, with the rate by the wall, where all of its iterations have told it."""
        ended, self._epoch = self._epoch, _WallSums()
        seconds = {"clock_seconds": ended.clock, "wall_seconds": ended.wall}
        return {"examples": ended.examples} | seconds | ended.rates() | ended.counted()

    def summary(self) -> dict[str, float | None]:
        """The run's rates, without its warm-up and what follows each epoch's last iteration; None of no iterations."""
        return self._run.rates() | {"share_off_the_clock": self._run.share_off_the_clock}

    def position(self) -> dict[str, Any]:
        """The sums so far (JSON), for `resume`."""
        return {"iterations": self._iterations, "epoch": asdict(self._epoch), "run": asdict(self._run)}

    def resume(self, position: dict[str, Any]) -> None:
        """Go on from there."""
        self._iterations = position["iterations"]
        # Of a checkpoint that does not know the counts they stay unknown, until the epoch is over.
        self._epoch, self._run = (_WallSums(**{"counts": None} | position[name]) for name in ("epoch", "run"))


@dataclass
class _WallSums:
    """Seconds by the wall and by the clock, examples, and what these come to; None where that is not known."""

    wall: float = 0.0
    clock: float = 0.0
    examples: int = 0
    counts: dict[str, int] | None = field(default_factory=dict)

    def add(self, wall: float, clock: float, examples: int, counts: Mapping[str, int]) -> None:
        self.wall += wall
        self.clock += clock
        self.examples += examples
        if self.counts is not None:
            self.counts = {name: self.counts.get(name, 0) + count for name, count in counts.items()}

    def counted(self) -> dict[str, Any]:
        rates = {
            f"{name}_per_second_wall": count / self.wall for name, count in (self.counts or {}).items() if self.wall
        }
        return {**(self.counts or {}), **rates}

    def rates(self) -> dict[str, Any]:
        return {
            "examples_per_second_clock": self.examples / self.clock if self.clock else None,
            "examples_per_second_wall": self.examples / self.wall if self.wall else None,
        }

    @property
    def share_off_the_clock(self) -> float | None:
        return 1 - self.clock / self.wall if self.wall else None
