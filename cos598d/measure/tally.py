"""What one rank's iterations come to in all: sums that are exact, flat in memory, and go on where they were saved."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from cos598d.comm.ledger import Totals
from cos598d.measure.totals import EpochTraffic
from cos598d.measure.wall import WallTime
from cos598d.measure.wire import Counters, Interface
from cos598d.records.conventions import PHASES
from cos598d.records.sums import IterationMeans

Row = dict[str, Any]


class Tally:
    """Seconds by phase (whole nanoseconds), calls, bytes, and wall time."""

    def __init__(self) -> None:
        self.traffic = EpochTraffic()
        self._means, self._wall = IterationMeans(), WallTime()

    def begin(self) -> None:
        """Training begins, or goes on after a pause."""
        self._wall.begin()

    def pause(self) -> None:
        """Training pauses."""
        self._wall.end()

    def iteration(
        self,
        facts: Row,
        seconds: float,
        phases: Mapping[str, float],
        moved: tuple[int, int],
        totals: Totals,
        counted: Counters | None,
        counts: Mapping[str, int],
    ) -> Row:
        """Add an iteration, with what its calls moved; return what its row says of it beside `facts`."""
        iteration = facts["iteration"]
        wall = self._wall.lap(seconds, facts["examples"], counts)
        timed = {"seconds": seconds, **{f"seconds_{phase}": phases[phase] for phase in PHASES}}
        nanoseconds = {name: round(1e9 * value) for name, value in timed.items()}
        self._means.count(iteration)
        self._means.add(iteration, nanoseconds | asdict(totals))
        row = {name: value / 1e9 for name, value in nanoseconds.items()} | {"wall_seconds": round(wall, 9)}
        return row | self.traffic.add(facts["epoch"], moved, counted) | asdict(totals)

    def add_to_last(self, iteration: int, moved: tuple[int, int], totals: Totals, counted: Counters | None) -> Row:
        """Add to the last iteration what calls moved after its end; return its bytes as they are now."""
        self._means.add(iteration, asdict(totals))
        return self.traffic.add_to_last(moved, counted)

    def epoch(self, facts: Row, last_iteration: int) -> Row:
        """End an epoch; return its row: `facts`, up to which iteration it went, and its speed."""
        row = facts | {"last_iteration": last_iteration}
        return row | {"training": self._wall.epoch()} if facts["iterations"] else row

    def share(self, interface: Interface | None) -> Row:
        """What rank 0 needs of this rank for the summary."""
        phases = {phase: self._means.mean_after_warm_up(f"seconds_{phase}") for phase in PHASES}
        return {
            "phases": {phase: None if mean is None else mean / 1e9 for phase, mean in phases.items()},
            **{field.name: self._means.mean(field.name) or 0 for field in fields(Totals)},
            "traffic": self.traffic.share(interface),
        }

    def wall_summary(self) -> dict[str, float | None]:
        """The run's rates by clock and wall."""
        return self._wall.summary()

    def position(self) -> Row:
        """The sums so far (JSON), for `resume`."""
        return {
            "means": self._means.position(),
            "traffic": self.traffic.position(),
            "wall": self._wall.position(),
        }

    def resume(self, position: Row) -> None:
        """Go on from there."""
        self._means.resume(position["means"])
        self.traffic.resume(position["traffic"])
        self._wall.resume(position["wall"])
