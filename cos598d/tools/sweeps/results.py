"""What came out of a sweep: a row for each combination, with the range over its repeats; and what a sweep will cost.

A speed-up is the seconds per epoch of the set-up 1x1 over those of the row. Where other programs took processors from
one of the two, or where it is more than the ranks or processors can give, it says so in the number's place.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cos598d.config import config_from
from cos598d.errors import WARNING, UserError
from cos598d.terminal.printable import printable
from cos598d.tools.report.busy import DISTURBED
from cos598d.tools.report.cells import Spread, as_lines
from cos598d.tools.report.compare import Group, speed_up
from cos598d.tools.report.records import Run, load_run
from cos598d.tools.report.tables import metrics_of
from cos598d.tools.report.verdict import busy_warning
from cos598d.tools.sweeps.plan import LINKS, SETUP, Planned

SECONDS, RATIO = "s/epoch", "speed-up"
# What may differ between a run and that of one rank that it is compared with.
HOW = ("label", SETUP, "sync", "zero_stage", *LINKS)


def forecast_words(runs: Sequence[Planned]) -> str:
    """A table of what each run sends and holds, and a sentence for each that cannot run. Loads torch."""
    from cos598d.cost.forecast import forecast

    rows, notes = [], list[str]()
    for number, one in enumerate(runs, 1):
        row = {"number": number, "run": one.name, "ranks": one.world_size}
        try:
            if one.refused:
                raise UserError(one.refused)
            found = forecast(config_from(one.flags), one.world_size)
            row["iterations"] = found.iterations
            if found.unsaid:
                raise UserError(found.unsaid)
            row |= {"sent MB/it": max(found.bytes_sent) / 1e6, "held MB": sum(found.memory.values()) / 1e6}
        except UserError as error:
            notes.append(printable(f"{one.name}: {error}"))
        rows.append(row)
    return "\n\n".join([as_lines(rows), *notes])


def results_words(runs: Sequence[Planned], folder: Path) -> str:
    """The table of the finished runs, with its warnings; "" if there are none."""
    places = {one.name: folder / one.name for one in runs if not one.refused}
    done = {name: load_run(place) for name, place in places.items() if (place / "summary.json").exists()}
    axes = dict.fromkeys(axis for one in runs for axis in one.varies)
    groups: dict[tuple, list[Planned]] = {}
    for one in runs:
        if one.name in done:
            groups.setdefault(tuple(one.varies.get(axis) for axis in axes), []).append(one)
    rows = []
    for values, group in groups.items():
        alone = [done[one.name] for one in runs if one.name in done and one.world_size == 1 and _work(one, group[0])]
        rows.append(dict(zip(axes, values)) | _figures([done[one.name] for one in group], alone))
    said = busy_warning([*done.values()])
    if not said and any(row.get(RATIO) == DISTURBED for row in rows):
        said = "a speed-up is more than there is to gain: something disturbed the run of one rank. Run it again."
    return "\n\n".join(filter(None, [f"{WARNING}{said}" if said else "", as_lines(rows) if rows else ""]))


def _work(one: Planned, other: Planned) -> bool:
    """Whether two runs do the same work."""
    first, second = ({axis: value for axis, value in of.varies.items() if axis not in HOW} for of in (one, other))
    return first == second


def _figures(group: Group, alone: Group) -> dict[str, Any]:
    """The means over the repeats of their metrics after the last epoch, and of seconds, MB sent and peaks of memory."""
    found: dict[str, Any] = {}
    for name in metrics_of(group[0].summary.epochs[-1]):
        found[name] = _mean([metrics_of(run.summary.epochs[-1])[name] for run in group])
    found["loss"] = _mean([run.summary.epochs[-1]["loss"] for run in group])
    found[SECONDS] = _mean([_epoch_seconds(run) for run in group])
    found[RATIO] = speed_up(group, alone, lambda runs: fmean(map(_epoch_seconds, runs))) if alone else None
    found["s/it"] = _mean([run.mean for run in group])
    found["sent MB/it"] = _mean([max(run.summary.bytes_sent_per_iteration) / 1e6 for run in group if run.is_in_ledger])
    counted = [run.summary.wire.bytes_sent_per_iteration for run in group if run.summary.wire]
    found["counted MB/it"] = _mean([max(byte for byte in sent if byte is not None) / 1e6 for sent in counted])
    peaks = [max(run.summary.memory.process_peak_bytes) / 1e6 for run in group if run.summary.memory]
    return found | {"peak MB": _mean(peaks)}


def _epoch_seconds(run: Run) -> float:
    """The mean over the whole epochs, without the first one if there are others: its first iterations are slow."""
    epochs = [one for one in run.summary.epochs if not one.get("is_cut")] or run.summary.epochs
    return fmean(epoch["training"]["wall_seconds"] for epoch in epochs[1:] or epochs)


def _mean(values: Sequence[float | None]) -> Spread | float | None:
    """The mean of those that are known, with the least and the most where they differ."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(fmean(known), min(known), max(known)) if min(known) < max(known) else fmean(known)
