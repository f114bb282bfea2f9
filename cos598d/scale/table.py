"""The model's costs, its predictions and its misses as text for the screen."""

from collections.abc import Callable, Mapping, Sequence

from cos598d.scale.fit import Fitted
from cos598d.scale.predict import Miss, Prediction
from cos598d.scale.records import Link
from cos598d.terminal.tables import as_text

GOAL = 0.15  # a miss beyond this is stated

LEGEND = (
    "speed-up: examples a second of n hosts over those of one alone, n t(1) / t(n): every host has a batch of its own\n"
    "(weak scaling). efficiency: speed-up / n. In [brackets] what was measured; the rest the model extrapolates.\n"
    "A host is taken to compute as fast as one of those that were measured, however many there are."
)


def describe_fit(fitted: Fitted) -> str:
    """What was fitted to what, and what was left out."""
    costs = fitted.costs
    lines = ["fitted to:"] + [f"  {record.name}: {record.words}" for record in fitted.records]
    lines.append(
        f"a call takes {costs.call_seconds * 1e3:.3g} ms, each of its steps {costs.step_seconds * 1e3:.3g} ms, "
        f"a byte moved {costs.processor_seconds_per_byte * 1e9:.3g} ns of the processor; "
        f"the link gives {costs.efficiency:.1%} of its rate"
    )
    if costs.codec_seconds:
        rows = [["codec's work", "seconds"]]
        rows += [[label, f"{seconds:+.3f}"] for label, seconds in costs.codec_seconds.items()]
        lines += ["", as_text(rows, numbers=True), ""]
    lines += fitted.remarks
    if costs.efficiency > 1:
        lines.append("a link cannot give more than its rate: too little travels here for the seconds to tell its speed")
    lines += [f"left out: {label}, for {reason}" for label, reason in fitted.left_out.items()]
    return "\n".join(lines)


def scale_table(points: Sequence[Prediction], link: Link, batch: int) -> str:
    """Seconds, speed-up and efficiency of every rung by the number of hosts, and what the words mean."""
    parts = [f"hosts with links of {link.words}, batch {batch} on each"]
    for title, cell in (
        ("seconds an iteration", lambda p: _pair(p.seconds, p.measured_seconds, "{:.3f}")),
        ("speed-up", lambda p: _pair(p.speed_up, p.measured_speed_up, "{:.2f}")),
        ("efficiency", lambda p: _pair(p.efficiency, _share(p), "{:.0%}")),
    ):
        parts.append(f"{title}, by the number of hosts\n{_by_hosts(points, cell)}")
    return "\n\n".join([*parts, LEGEND])


def miss_table(found: Sequence[Miss], name: str, words: str, unknown: Sequence[str], own_compute: bool) -> str:
    """Predicted and measured of one record's rungs, and the largest misses in words.

    `own_compute`: the compute is that of the record itself.
    """
    rows = [["sync", "predicted s", "measured s", "miss"]]
    rows += [
        [miss.sync, f"{miss.predicted_seconds:.4f}", f"{miss.measured_seconds:.4f}", f"{miss.miss:+.1%}"]
        for miss in found
    ]
    large = [f"{miss.sync} ({miss.miss:+.1%})" for miss in found if abs(miss.miss) > GOAL]
    verdict = f"missed by more than {GOAL:.0%}: {', '.join(large)}" if large else f"every miss is within {GOAL:.0%}"
    lines = [f"{name}: {words}, as the others predict it", as_text(rows, numbers=True), verdict]
    if own_compute:
        lines.append(
            "its ranks share the cores otherwise than those of the others, so each computes at another speed: "
            "the compute is its own floor's, and the communication what is predicted"
        )
    if unknown:
        lines.append(f"not predicted, since no other record has them: {', '.join(unknown)}")
    return "\n\n".join(lines)


def grid_table(found: Mapping[str, Sequence[Miss]]) -> str:
    """Of misses by record, every rung's in every record (predicted / measured - 1), and the largest."""
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


def _share(point: Prediction) -> float | None:
    return None if point.measured_speed_up is None else point.measured_speed_up / point.hosts


def _pair(predicted: float, measured: float | None, form: str) -> str:
    return form.format(predicted) + (f" [{form.format(measured)}]" if measured is not None else "")
