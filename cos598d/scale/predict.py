"""Predictions beside measurements: how every rung scales, and how far a record lies from what others say of it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.records.conventions import FLOOR
from cos598d.scale.fit import Fitted
from cos598d.scale.records import BenchSeconds, Link


@dataclass(frozen=True)
class Prediction:
    """A rung on some hosts; `measured_seconds`, and the speed-up by it, are None where it is extrapolated.

    speed_up     examples a second of all hosts over those of one host alone: n t(1) / t(n), each host with a batch of
                 its own (weak scaling); that of a measurement is against what was measured without a sync
    efficiency   speed_up / n
    """

    sync: str
    hosts: int
    seconds: float
    speed_up: float
    efficiency: float
    measured_seconds: float | None = None
    measured_speed_up: float | None = None


@dataclass(frozen=True)
class Miss:
    """A rung of a record, measured and as others predict it; `miss` is predicted / measured - 1."""

    sync: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def miss(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def host_counts(largest: int, measured: Sequence[int]) -> list[int]:
    """1, 2, 4, 8 ... up to `largest`, itself, and what was measured below it."""
    powers = [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]
    return sorted({*powers, largest, *(ranks for ranks in measured if ranks <= largest)})


def scale_points(fitted: Fitted, largest: int, link: Link, batch: int) -> list[Prediction]:
    """Every rung on 1 to `largest` hosts with this link and batch, in the order of the records."""
    alone = fitted.compute(batch)[0].seconds
    points = []
    for label in fitted.rungs:
        for hosts in host_counts(largest, [record.ranks for record in fitted.records]):
            seconds = fitted.predict(label, hosts, link, batch)
            measured = [
                (rung.seconds, hosts * record.compute.seconds / rung.seconds)
                for record in fitted.records
                if (record.ranks, record.link, record.batch) == (hosts, link, batch)
                for rung in record.rungs
                if rung.label == label
            ]
            found = [statistics.median(values) for values in zip(*measured, strict=True)] or [None, None]
            points.append(Prediction(label, hosts, seconds, hosts * alone / seconds, alone / seconds, *found))
    return points


def is_crowded_otherwise(fitted: Fitted, record: BenchSeconds) -> bool:
    """Whether a core has another number of the record's ranks than of those fitted, and so another speed for each."""
    return record.crowd != fitted.base[0].crowd


def misses(fitted: Fitted, record: BenchSeconds) -> list[Miss]:
    """What `fitted` says of a record's rungs, of those that it knows.

    Where its ranks are crowded otherwise they take the record's own compute: then the communication alone is predicted,
    and the floor is not.
    """
    on = record if is_crowded_otherwise(fitted, record) else None
    return [
        Miss(rung.label, fitted.predict(rung.label, record.ranks, record.link, record.batch, on), rung.seconds)
        for rung in record.rungs
        if rung.label in fitted.rungs and not (on and rung.sync == FLOOR)
    ]
