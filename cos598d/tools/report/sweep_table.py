"""The table of a sweep: a row for each combination of values, its seeds together."""

from collections.abc import Sequence

from cos598d.records.conventions import BROKEN_OFF, FAILED, LEFT_OUT
from cos598d.terminal.words import number_of
from cos598d.tools.report.attempts import stopped_early
from cos598d.tools.report.epochs import is_cut, whole_epochs
from cos598d.tools.report.load import Run
from cos598d.tools.report.strategies import sent_bytes
from cos598d.tools.report.sweep_entries import SeedGroup, SweepEntry, axes_of, combinations_of
from cos598d.tools.report.sweep_measures import (
    SPEED_UP,
    Measure,
    Spread,
    metric_measures,
    seconds_measure,
    speed_up,
    spread_of,
    training_loss,
)

TABLE_NOTE = (
    "Figures are means over the seeds, the least and the most of them in brackets. Metrics and losses: of the last "
    "epoch; training loss: of the last whole one. s/epoch: a whole epoch's training by the wall, evaluation left out. "
    "Speed-up: the seconds of setup 1x1 with the same other settings over these, seed by seed. Sent: by the rank that "
    "sends most, by the ledger; or the mean over the ranks, by the kernel's counters, where a library tells nobody "
    "what it sends. Epochs: those that were trained."
)


def sweep_rows(entries: Sequence[SweepEntry]) -> list[list[str]]:
    """A head and a row for each combination, those without a finished run too."""
    found = combinations_of(entries)
    axes, speed = list(axes_of(found)), speed_up(found)
    measures = [*metric_measures(found), training_loss(), seconds_measure(with_disturbed=True)]
    heads = [*(measure.title for measure in measures[:-1]), "s/epoch"]
    if any(speed.by_seed(one) for one in found):
        measures, heads = [*measures, speed], [*heads, SPEED_UP]
    rows = [[*axes, "seeds", *heads, "sent MB/it", "epochs", "remarks"]]
    for one in found:
        cells = [_cell(measure, measure.spread(one)) for measure in measures]
        sent = spread_of([value for run in one.runs if (value := sent_bytes(run.summary)) is not None])
        cells.append(f"{sent.mean / 1e6:,.2f}" if sent else "-")
        settings = [one.settings.get(axis, "-") for axis in axes]
        rows.append([*settings, _seeds(one), *cells, _epochs(one.runs), "; ".join(_remarks(one))])
    return rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]


def _cell(measure: Measure, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    mean, least, most = (measure.words(value).removesuffix(" s") for value in spread[:3])
    return mean if spread.seeds == 1 else f"{mean} ({least}-{most})"


def _seeds(one: SeedGroup) -> str:
    done, asked = len(one.runs), len(one.entries)
    return str(done) if done == asked else f"{done} of {asked}"


def _epochs(runs: Sequence[Run]) -> str:
    counts = sorted({len(whole_epochs(run.summary)) for run in runs})
    words = f"{counts[0]}-{counts[-1]}" if len(counts) > 1 else str(counts[0]) if counts else "-"
    return words + (" and a part" if any(is_cut(run.summary["epochs"][-1], run.summary) for run in runs) else "")


def _remarks(one: SeedGroup) -> list[str]:
    """What happened on the way, seed by seed."""
    found = []
    for entry in one.entries:
        seed = f"seed {entry.seed}"
        if entry.run is None:
            found.append({FAILED: f"{seed} failed", BROKEN_OFF: f"{seed} not finished"}.get(entry.outcome, LEFT_OUT))
            continue
        attempts = len(entry.run.summary.get("attempts", []))
        if attempts > 1:
            found.append(f"{seed} took {number_of(attempts, 'attempt')}")
        if stopped_early(entry.run):
            found.append(f"{seed} stopped early")
    return list(dict.fromkeys(found))
