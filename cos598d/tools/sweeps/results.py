"""What came out of a sweep: a row for each combination, with the range over its repeats; and what a sweep will cost.

A speed-up is the seconds per epoch of the set-up 1x1 over those of the row. Where other programs took processors from
one of the two, or where it is more than the ranks or processors can give, it says so in the number's place.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cos598d.config import config_from
from cos598d.errors import UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_text
from cos598d.tools.report.busy import DISTURBED, TOLERANCE, most_speed_up
from cos598d.tools.report.records import Run, load_run
from cos598d.tools.report.tables import metrics_of
from cos598d.tools.report.verdict import busy_warning
from cos598d.tools.sweeps.plan import LINKS, SETUP, Planned

SECONDS, RATIO = "s/epoch", "speed-up"
Row = dict[str, Any]


def forecast_words(runs: Sequence[Planned]) -> str:
    """A table of what each run sends and holds, and a sentence for each that cannot run. Loads torch."""
    from cos598d.cost.forecast import forecast

    rows, notes = [["", "run", "ranks", "iterations", "sent MB/it", "held MB"]], list[str]()
    for number, one in enumerate(runs, 1):
        cells = ["-", "-", "-"]
        try:
            if one.refused:
                raise UserError(one.refused)
            found = forecast(config_from(one.flags), one.world_size)
            cells[0] = str(found.iterations)
            if found.unsaid:
                raise UserError(found.unsaid)
            cells[1:] = [f"{max(found.bytes_sent) / 1e6:,.2f}", f"{sum(found.memory.values()) / 1e6:,.1f}"]
        except UserError as error:
            notes.append(printable(f"{one.name}: {error}"))
        rows.append([str(number), one.name, str(one.world_size), *cells])
    return "\n\n".join([as_text(rows, numbers=True), *notes])


def results_words(runs: Sequence[Planned], folder: Path) -> str:
    """The table of the finished runs, with its warnings; "" if there are none."""
    done = [one for one in runs if not one.refused and (folder / one.name / "summary.json").exists()]
    loaded = [load_run(folder / one.name) for one in done]
    rows = [{**one.varies, **_figures(run)} for one, run in zip(done, loaded, strict=True)]
    if not rows:
        return ""
    axes = [name for name in dict.fromkeys(axis for one in runs for axis in one.varies) if name != "label"]
    labels = ["label"] if any("label" in row for row in rows) else []
    bases: dict[tuple, list[Row]] = {}
    for row, one, run in zip(rows, done, loaded, strict=True):
        row |= {"disturbed": bool(run.busy), "most": most_speed_up(one.world_size, run.environment)}
        if one.world_size == 1:
            bases.setdefault(_work(row, axes), []).append(row)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in (*labels, *axes)), []).append(row)
    shown = [_shown(group, bases.get(_work(group[0], axes), []), (*labels, *axes)) for group in groups.values()]
    head = list(dict.fromkeys(name for row in shown for name in row))
    head = [name for name in head if any(row.get(name, "-") != "-" for row in shown)]
    table = as_text([head, *([row.get(name, "-") for name in head] for row in shown)], numbers=True)
    return "\n\n".join(filter(None, [_warning(loaded, shown), table]))


def _figures(run: Run) -> Row:
    """A run's metrics after its last epoch, the seconds of an epoch and an iteration, MB sent, and the peak of memory.

    The first epoch's seconds are left out where there are others, since its first iterations are slow.
    """
    summary, epochs = run.summary, run.summary.epochs
    counted = [sent for sent in (summary.wire.bytes_sent_per_iteration if summary.wire else ()) if sent is not None]
    return {
        **metrics_of(epochs[-1]),
        "loss": epochs[-1]["loss"],
        SECONDS: fmean(epoch["training"]["wall_seconds"] for epoch in epochs[1:] or epochs),
        "s/it": run.mean,
        "sent MB/it": max(summary.bytes_sent_per_iteration) / 1e6,
        "counted MB/it": max(counted) / 1e6 if counted else None,
        "peak MB": max(summary.memory.process_peak_bytes) / 1e6 if summary.memory else None,
    }


def _work(row: Row, axes: Sequence[str]) -> tuple:
    """What a row shares with the run of one rank that it is compared with."""
    return tuple(row.get(name) for name in axes if name not in (SETUP, "sync", "zero_stage", *LINKS))


def _shown(group: list[Row], bases: list[Row], names: Sequence[str]) -> dict[str, str]:
    """The cells of one combination: means, and the least and the most where it ran several times."""
    cells = {name: "-" if group[0].get(name) is None else str(group[0][name]) for name in names}
    for name in group[0]:
        values = [row[name] for row in group if row.get(name) is not None]
        if name in (*names, "disturbed", "most") or not values:
            continue
        spread = f" ({min(values):.4g} to {max(values):.4g})" if min(values) < max(values) else ""
        cells[name] = f"{fmean(values):.4g}{spread}"
        if name == SECONDS and bases:
            ratio = fmean(row[SECONDS] for row in bases) / fmean(values)
            is_odd = any(row["disturbed"] for row in (*group, *bases)) or ratio > TOLERANCE * group[0]["most"]
            cells[RATIO] = DISTURBED if is_odd else f"{ratio:.2f}"
    return cells


def _warning(runs: Sequence[Run], shown: Sequence[dict[str, str]]) -> str:
    said = busy_warning(runs)
    if not said and any(row.get(RATIO) == DISTURBED for row in shown):
        said = "a speed-up is more than there is to gain: something disturbed the run of one rank. Run it again."
    return f"warning: {said}" if said else ""
