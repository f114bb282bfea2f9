"""Predictions of the fitted model next to measurements, and both as text: how syncs scale, and the errors."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cos598d.cost.benches import BenchSeconds
from cos598d.cost.fit import Fitted
from cos598d.cost.model import Link
from cos598d.records.conventions import FLOOR
from cos598d.terminal.tables import as_text
from cos598d.terminal.words import listed, number_of


@dataclass(frozen=True)
class Prediction:
    """A sync on some hosts; `measured_seconds`, and its speed-up, are None if it is extrapolated.

    speed_up     examples per second of all hosts over those of one host: n t(1) / t(n), each host with a batch of its
                 own (weak scaling); a measured one is relative to the measurement without a sync
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
    """A sync of a record, measured and predicted from other records. `miss` is predicted / measured - 1."""

    sync: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def miss(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def host_counts(largest: int, measured: Sequence[int]) -> list[int]:
    """1, 2, 4, 8 ... up to `largest`, `largest` itself, and the measured numbers below it."""
    powers = [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]
    return sorted({*powers, largest, *(ranks for ranks in measured if ranks <= largest)})


def scale_points(fitted: Fitted, largest: int, link: Link, batch: int) -> list[Prediction]:
    """Every sync on 1 to `largest` hosts with this link and batch, in the order of the records."""
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
    """Whether the record's ranks per core differ from the fitted records', and so the speed of each rank."""
    return record.crowd != fitted.base[0].crowd


def misses(fitted: Fitted, record: BenchSeconds) -> list[Miss]:
    """The predictions of `fitted` for a record's built-in syncs that it knows.

    If the record's ranks per core differ, its own compute is used. Then only the communication is predicted, and the
    floor is left out.
    """
    on = record if is_crowded_otherwise(fitted, record) else None
    return [
        Miss(rung.label, fitted.predict(rung.label, record.ranks, record.link, record.batch, on), rung.seconds)
        for rung in record.rungs
        if rung.label in fitted.rungs and not (on and rung.sync == FLOOR)
    ]


TIED = 1.01  # times the fastest's seconds that count as its own
GOAL = 0.15  # larger errors are listed

LEGEND = (
    "speed-up: examples per second of n hosts over those of one, n t(1) / t(n); every host has its own batch\n"
    "(weak scaling). Efficiency: speed-up / n. Numbers in [brackets] were measured; the others are predicted.\n"
    "Every host is assumed to compute as fast as one that was measured."
)


def describe_fit(fitted: Fitted) -> str:
    """The fitted costs, their source, and what was left out."""
    costs = fitted.costs
    lines = ["fitted to:"] + [f"  {record.name}: {record.words}" for record in fitted.records]
    lines.append(
        f"a call takes {costs.call_seconds * 1e3:.3g} ms, each of its steps {costs.step_seconds * 1e3:.3g} ms, "
        f"a byte moved {costs.processor_seconds_per_byte * 1e9:.3g} ns of the processor; "
        f"the link gives {costs.efficiency:.1%} of its rate"
    )
    if costs.codec_seconds:
        rows = [["compression", "seconds"]]
        rows += [[label, f"{seconds:+.3f}"] for label, seconds in costs.codec_seconds.items()]
        lines += ["", as_text(rows, numbers=True), ""]
    lines += fitted.remarks
    if costs.efficiency > 1:
        lines.append("warning: a link cannot exceed its rate, so these benches send too little to measure its speed")
    lines += [f"left out: {label}, for {reason}" for label, reason in fitted.left_out.items()]
    return "\n".join(lines)


def scale_table(points: Sequence[Prediction], link: Link, batch: int) -> str:
    """Which is the fastest on most hosts, then seconds and speed-up of every sync by the number of hosts."""
    most = max(point.hosts for point in points)
    ranked = sorted((p for p in points if p.hosts == most and p.sync != FLOOR), key=lambda point: point.seconds)
    parts = [f"{number_of(most, 'host')} with links of {link.words}, batch {batch} on each"]
    if ranked:
        best = ranked[0]
        same = [one.sync for one in ranked if one.seconds <= best.seconds * TIED]
        speed = f"{best.speed_up:.2f} times the examples per second of one host ({best.efficiency:.0%} efficiency)"
        parts[0] = f"{listed(same)} {'is' if len(same) == 1 else 'are'} the fastest on {parts[0]}: {speed}."
    for title, cell in (
        ("seconds per iteration", lambda p: _pair(p.seconds, p.measured_seconds, "{:.3f}")),
        ("speed-up", lambda p: _pair(p.speed_up, p.measured_speed_up, "{:.2f}")),
    ):
        parts.append(f"{title}, by the number of hosts\n{_by_hosts(points, cell)}")
    return "\n\n".join([*parts, LEGEND])


def miss_table(found: Sequence[Miss], name: str, words: str, unknown: Sequence[str], own_compute: bool) -> str:
    """Predictions and measurements of one record's built-in syncs, and a sentence about the largest errors.

    `own_compute`: the compute is the record's own.
    """
    rows = [["sync", "predicted s", "measured s", "miss"]]
    rows += [
        [miss.sync, f"{miss.predicted_seconds:.4f}", f"{miss.measured_seconds:.4f}", f"{miss.miss:+.1%}"]
        for miss in found
    ]
    large = [f"{miss.sync} ({miss.miss:+.1%})" for miss in found if abs(miss.miss) > GOAL]
    verdict = f"missed by more than {GOAL:.0%}: {', '.join(large)}" if large else f"every miss is within {GOAL:.0%}"
    lines = [f"{name}: {words}, predicted from the others", as_text(rows, numbers=True), verdict]
    if own_compute:
        lines.append(
            "its ranks share the cores differently, so they compute at another speed: compute is from its own "
            "baseline, and only communication is predicted"
        )
    if unknown:
        lines.append(f"not predicted, since no other bench has them: {', '.join(unknown)}")
    return "\n\n".join(lines)


def grid_table(found: Mapping[str, Sequence[Miss]]) -> str:
    """The errors (predicted / measured - 1) of every sync in every record, and the largest."""
    labels = list(dict.fromkeys(miss.sync for misses in found.values() for miss in misses))
    by_place = {(miss.sync, name): miss.miss for name, misses in found.items() for miss in misses}
    rows = [["sync", *found, "largest"]]
    for label in labels:
        own = [by_place.get((label, name)) for name in found]
        largest = max((miss for miss in own if miss is not None), key=abs)
        rows.append([label, *("-" if miss is None else f"{miss:+.1%}" for miss in own), f"{largest:+.1%}"])
    return as_text(rows, numbers=True)


def _by_hosts(points: Sequence[Prediction], cell: Callable[[Prediction], str]) -> str:
    counts = sorted({point.hosts for point in points})
    rows = [["sync", *map(str, counts)]]
    for label in dict.fromkeys(point.sync for point in points):
        of_label = {point.hosts: point for point in points if point.sync == label}
        rows.append([label, *(cell(of_label[count]) for count in counts)])
    return as_text(rows, numbers=True)


def _pair(predicted: float, measured: float | None, form: str) -> str:
    return form.format(predicted) + (f" [{form.format(measured)}]" if measured is not None else "")
