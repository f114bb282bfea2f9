"""What a sweep shows: a line when a run has ended, and at the end the table and the page of all."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from cos598d.checkpoint_flags import LOSS_METRIC
from cos598d.data import get_task
from cos598d.errors import WARNING
from cos598d.records.conventions import BROKEN_OFF, FAILED, LEFT_OUT, NOT_METRICS
from cos598d.terminal.files import write_whole
from cos598d.terminal.own_code import is_own
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_markdown, as_text, markdown_text
from cos598d.tools.report.epochs import epoch_seconds
from cos598d.tools.report.load import Run, is_number
from cos598d.tools.report.render import as_html
from cos598d.tools.report.sweep_entries import SweepEntry
from cos598d.tools.report.sweep_page import sentences, sweep_page
from cos598d.tools.report.sweep_table import BRIEF_NOTE, TABLE_NOTE, brief_rows, sweep_rows, unlike
from cos598d.tools.runs.folder import writing

PAGE, TABLE = "report.html", "table.md"


def result_words(run: Run) -> str:
    """A finished run's results: the task's metrics and the losses of its last epoch, and the seconds of one."""
    last = run.summary["epochs"][-1]
    task = run.config["task_name"]
    metrics = [name for name in last if name not in NOT_METRICS | {LOSS_METRIC}]  # no code of a user's file is run here
    names = [*(metrics if is_own(task) else get_task(task).metrics), LOSS_METRIC, "loss"]
    shown = [f"{name} {last[name]:.4f}" for name in names if is_number(last.get(name))]
    return ", ".join([*shown, f"{epoch_seconds(run):.3g} s per epoch"])


def settings_words(settings: Mapping[str, str]) -> str:
    """The settings as text: "batch 4, setup 2x2"."""
    return ", ".join(f"{axis} {word}" for axis, word in settings.items())


def show(path: Path, entries: Sequence[SweepEntry], title: str, remarks: Sequence[str]) -> None:
    """Print the answer and a small table; write the whole one in Markdown, and the page."""
    absent = list(dict.fromkeys(_why_not(entry) for entry in entries if entry.run is None))
    if not any(entry.run for entry in entries):
        print("", *map(printable, absent), sep="\n")
        return
    rows = sweep_rows(entries)
    notes = [*(f"{WARNING}{one}" for one in [*remarks, *unlike(entries)]), *absent]
    answer = " ".join(sentences(entries))
    table = [as_text(brief_rows(entries), numbers=True), textwrap.fill(BRIEF_NOTE, 118)]
    parts = [textwrap.fill(printable(answer), 118), *table, *map(printable, notes)]
    print("", "\n\n".join(parts), "", sep="\n")
    words = [markdown_text(answer), as_markdown(rows), *map(markdown_text, [TABLE_NOTE, *notes])]
    page = as_html(sweep_page(entries, title))
    with writing(path):
        write_whole(path / TABLE, "\n\n".join(words) + "\n")
        write_whole(path / PAGE, page)
    print(f"all columns: {path / TABLE}\npage: {path / PAGE}")


def _why_not(entry: SweepEntry) -> str:
    how = {FAILED: "failed", BROKEN_OFF: "is not finished", LEFT_OUT: "is left out"}[entry.outcome]
    seed = "" if entry.outcome == LEFT_OUT else f", seed {entry.seed}"
    return f"{settings_words(entry.settings)}{seed} {how}: {entry.said}"
