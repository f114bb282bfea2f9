"""How the syncs scale: predictions next to measurements, as points and as a table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.cost.predict import Fitted, Link
from cos598d.records.conventions import FLOOR
from cos598d.terminal.tables import as_text
from cos598d.terminal.words import number_of

LEGEND = (
    "speed-up: examples per second of n hosts over those of one, n t(1) / t(n); every host has its own batch\n"
    "(weak scaling). Numbers in [brackets] were measured; the others are predicted. Every host is assumed to compute\n"
    "as fast as one that was measured."
)


@dataclass(frozen=True)
class Point:
    """A sync on some hosts. `measured_seconds` is None if no bench has measured it there."""

    sync: str
    hosts: int
    seconds: float
    speed_up: float
    measured_seconds: float | None


def scale_points(fitted: Fitted, largest: int, link: Link, batch: int) -> list[Point]:
    """Every sync on 1, 2, 4, 8 ... `largest` hosts with this link and batch, and on those that were measured."""
    powers = [1 << power for power in range(largest.bit_length())]
    counts = sorted({*powers, largest, *(bench.ranks for bench in fitted.benches if bench.ranks <= largest)})
    points = []
    for label in dict.fromkeys(rung.label for bench in fitted.benches for rung in bench.rungs):
        of_hosts = {hosts: fitted.predict(label, hosts, link, batch) for hosts in counts}
        for hosts, seconds in of_hosts.items():
            measured = [
                rung.seconds
                for bench in fitted.benches
                if (bench.ranks, bench.link, bench.batch) == (hosts, link, batch)
                for rung in bench.rungs
                if rung.label == label
            ]
            found = statistics.median(measured) if measured else None
            points.append(Point(label, hosts, seconds, hosts * of_hosts[1] / seconds, found))
    return points


def scale_table(points: Sequence[Point], link: Link, batch: int) -> str:
    """Which is the fastest on most hosts, then seconds and speed-up of every sync by the number of hosts."""
    counts = sorted({point.hosts for point in points})
    best = min((one for one in points if one.hosts == counts[-1] and one.sync != FLOOR), key=lambda one: one.seconds)
    head = (
        f"{best.sync} is the fastest on {number_of(best.hosts, 'host')} with links of {link.words}, batch {batch} on "
        f"each: {best.speed_up:.2f} times the examples per second of one host."
    )
    tables = []
    for title, form in (("seconds per iteration", "{:.3f}"), ("speed-up", "{:.2f}")):
        rows = [["sync", *map(str, counts)]]
        for label in dict.fromkeys(point.sync for point in points):
            own = [point for point in points if point.sync == label]
            rows.append([label, *(_cell(point, title == "speed-up", form) for point in own)])
        tables.append(f"{title}, by the number of hosts\n{as_text(rows, numbers=True)}")
    return "\n\n".join([head, *tables, LEGEND])


def describe_fit(fitted: Fitted) -> str:
    """The fitted costs, their source, and what was left out."""
    costs = fitted.costs
    lines = ["fitted to:"] + [f"  {bench.name}: {bench.words}" for bench in fitted.benches]
    lines.append(
        f"a step takes {costs.step * 1e3:.3g} ms of a processor, a byte {costs.byte * 1e9:.3g} ns; a link gives "
        f"{costs.efficiency:.1%} of its rate"
    )
    left_out = {label: reason for bench in fitted.benches for label, reason in bench.left_out.items()}
    return "\n".join([*lines, *(f"left out: {label}, since {reason}" for label, reason in left_out.items())])


def _cell(point: Point, is_speed: bool, form: str) -> str:
    factor = point.speed_up * point.seconds if is_speed else 1.0
    values = [point.seconds, point.measured_seconds] if point.measured_seconds else [point.seconds]
    shown = [form.format(factor / value if is_speed else value) for value in values]
    return shown[0] + "".join(f" [{each}]" for each in shown[1:])
