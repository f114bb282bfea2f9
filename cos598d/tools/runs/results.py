"""What is shown of many runs: their cost before they start, a line for each that ends, then a table and a page."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cos598d.checkpoint_flags import LOSS_METRIC
from cos598d.config import config_from
from cos598d.cost.forecast import Forecast, forecast
from cos598d.data import get_task
from cos598d.errors import WARNING, UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, LEFT_OUT, NOT_METRICS
from cos598d.terminal.files import write_whole
from cos598d.terminal.own_code import is_own
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_markdown, as_text, markdown_text
from cos598d.tools.report.blocks import Page, Table, as_html
from cos598d.tools.report.epochs import epoch_seconds
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import is_number
from cos598d.tools.report.sweep_entries import SweepEntry
from cos598d.tools.report.sweep_page import sentences, sweep_page
from cos598d.tools.report.sweep_table import BRIEF_NOTE, TABLE_NOTE, brief_rows, sweep_rows, unlike
from cos598d.tools.runs.folder import writing
from cos598d.tools.runs.plan import PlannedRun

PAGE, TABLE = "report.html", "table.md"
HEAD = ["run", "times", "ranks", "iterations", "sent MB/it", "held MB"]


def forecast_words(runs: Sequence[PlannedRun]) -> str:
    """A table of what the runs of each name send and hold. A run without a prediction has a sentence instead.

    The first run of each name stands for the others. Sent: by the rank that sends most. Held: just before a step.
    """
    rows, notes = [HEAD], list[str]()
    times = Counter(one.name for one in runs if not one.refused)
    for name in times:
        one = next(one for one in runs if one.name == name)
        try:
            found = forecast(config_from(one.values), one.setup.world_size)
        except UserError as error:
            notes.append(f"{name}: {error}")
            continue
        rows.append([name, str(times[name]), str(one.setup.world_size), *_cells(found)])
        notes += [f"{name}: {found.unsaid}."] if found.unsaid else []
    return "\n\n".join([as_text(rows, numbers=True), *map(printable, dict.fromkeys(notes))])


def _cells(found: Forecast) -> list[str]:
    if found.unsaid:
        return [str(found.iterations), "-", "-"]
    return [
        str(found.iterations),
        f"{max(found.bytes_sent) / 1e6:,.2f}",
        f"{sum(found.memory.values()) / 1e6:,.1f}",
    ]


def result_words(run: Run) -> str:
    """A finished run's results: the task's metrics and the losses of its last epoch, and the seconds of one."""
    last = run.summary["epochs"][-1]
    task = run.config["task_name"]
    metrics = [name for name in last if name not in NOT_METRICS | {LOSS_METRIC}]  # no code of a user's file is run here
    names = [*(metrics if is_own(task) else get_task(task).metric.names), LOSS_METRIC, "loss"]
    shown = [f"{name} {last[name]:.4f}" for name in names if is_number(last.get(name))]
    return ", ".join([*shown, f"{epoch_seconds(run):.3g} s per epoch"])


def settings_words(settings: Mapping[str, str]) -> str:
    """The settings as text: "batch 4, setup 2x2"."""
    return ", ".join(f"{axis} {word}" for axis, word in settings.items())


def show_sweep(path: Path, entries: Sequence[SweepEntry], title: str, remarks: Sequence[str]) -> None:
    """`show` a sweep; if no run has finished, print only why."""
    absent = list(dict.fromkeys(_why_not(entry) for entry in entries if entry.run is None))
    if not any(entry.run for entry in entries):
        print("", *map(printable, absent), sep="\n")
        return
    brief, whole = Table(BRIEF_NOTE, brief_rows(entries)), Table(TABLE_NOTE, sweep_rows(entries))
    show(path, [*remarks, *unlike(entries)], sentences(entries), brief, whole, absent, sweep_page(entries, title))


def show(
    path: Path,
    warnings: Sequence[str],
    answer: Sequence[str],
    brief: Table,
    whole: Table,
    absent: Sequence[str],
    page: Page | None,
) -> None:
    """Print the warnings, the answer, a brief table, and why runs are absent; write the whole table in Markdown, and
    the page of the runs if there is one. Raises UserError if a file cannot be written."""
    warnings, said = [f"{WARNING}{one}" for one in warnings], " ".join(answer)
    parts = [*map(printable, warnings), textwrap.fill(printable(said), 118), as_text(brief.rows, numbers=True)]
    parts += [textwrap.fill(brief.caption, 118), *map(printable, absent)]
    print("", "\n\n".join(filter(None, parts)), "", sep="\n")
    words = [*map(markdown_text, [*warnings, said]), as_markdown(whole.rows)]
    words += map(markdown_text, [whole.caption, *absent])
    with writing(path):
        write_whole(path / TABLE, "\n\n".join(filter(None, words)) + "\n")
        print(f"all columns: {path / TABLE}")
        if page:
            write_whole(path / PAGE, as_html(page))
            print(f"page: {path / PAGE}")


def _why_not(entry: SweepEntry) -> str:
    how = {FAILED: "failed", BROKEN_OFF: "is not finished", LEFT_OUT: "is left out"}[entry.outcome]
    seed = "" if entry.outcome == LEFT_OUT else f", seed {entry.seed}"
    return f"{settings_words(entry.settings)}{seed} {how}: {entry.said}"


def seconds_words(seconds: float) -> str:
    """A duration as text: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
