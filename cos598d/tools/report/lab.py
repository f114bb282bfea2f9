"""A lab's report to fill in: the four tasks' figures from their records only, with blanks for your answers."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from cos598d.errors import WARNING, UserError
from cos598d.records.conventions import PHASES
from cos598d.records.run import Summary
from cos598d.terminal.tables import as_markdown, markdown_text
from cos598d.terminal.words import listed
from cos598d.tools.report.classes import one_class_remark
from cos598d.tools.report.disturbed import DISTURBED, disturbance_remark
from cos598d.tools.report.epochs import metric_names, number_in_words
from cos598d.tools.report.fairness import code_remark, ground_remark, work_remark
from cos598d.tools.report.load import iteration_rows, load_run
from cos598d.tools.report.numbers import cell
from cos598d.tools.report.references import is_disturbed
from cos598d.tools.report.table import losses_rows
from cos598d.tools.report.traffic_table import assumed_bytes, traffic_rows

# The label that a task's script gives its run, in the record.
TASKS = ("task1", "task2a", "task2b", "task3")
DEEPEST = 2  # folders between that of the lab and a run's
SUMMARY_FILE = "summary.json"
BLANK = "> *Your answer:*"
# The questions of each section, after which their answers go.
QUESTIONS = {
    "losses": (
        "By how much do the losses of tasks 2(a), 2(b) and 3 differ from those of task 1, and why by no more, and no "
        "less?",
    ),
    "seconds": (
        "Which task is the fastest, by how much, and in which phase does it gain that time?",
        "Why is the first iteration left out? Would you leave out more?",
        "How many times as fast as task 1 is each of the others, and why is it not as many times as there are ranks?",
    ),
    "bytes": (
        "S is the gradient's size (payload), n the number of ranks. Write down, for each task, the bytes that rank 0 "
        "sends in an iteration, and the others, as formulas of n and S. Do they agree with the table?",
        "Two tasks may send the same bytes and still take different times. What else costs time?",
        "What would change with eight ranks? With links of a tenth of the rate?",
    ),
    "accuracy": ("Should the tasks come to the same accuracy? Do they? What would you look at if one did not?",),
}


def lab_page(folder: Path) -> str:
    """The report, in Markdown, of the runs in `folder`; their records name their task.

    Seconds exclude only the first iteration, as the lab asks. Raises UserError if a task has no record there, or one
    that cannot be read.
    """
    runs = find_runs(folder)
    summaries = [summary for _, summary in runs]
    about = (disturbance_remark, work_remark, ground_remark, code_remark, one_class_remark)
    remarks = [remark(summaries) for remark in about]
    parts = [
        "# Lab report: four ways to share one step",
        "Name: ........................................ Date: ....................",
        "The tables are made from the runs' records. Write below each question.",
        "## The runs",
        as_markdown(_setting_rows(summaries)),
        *(markdown_text(f"{WARNING}{remark}") for remark in remarks if remark),
        "> *Your hosts, and how they are joined:*",
        "## Losses",
        as_markdown(losses_rows(summaries)),
        *_questions("losses"),
        "## Seconds per iteration",
        as_markdown(_seconds_rows(runs)),
        "The first iteration has its own column. The other figures are means over the rest, on rank 0. DDP's calls "
        "run during backward and have no phase of their own.",
        *_questions("seconds"),
        "## Bytes",
        as_markdown(traffic_rows(summaries)),
        "All columns are means over every iteration, the first one too: calls and bytes, unlike seconds, do not change "
        "while the processes warm up. "
        "MB: 1,000,000 bytes. Payload is the size of all gradients; sent and received are by formula, and counted is "
        "what the kernel saw leave by the interface, with headers and all else; on one host by each rank's own "
        "sockets, without headers." + assumed_bytes(summaries, before=" "),
        *_questions("bytes"),
        "## Accuracy",
        as_markdown(_metric_rows(summaries)),
        "An epoch is marked as cut where the training ended within it: its loss is the mean of fewer steps.",
        *_questions("accuracy"),
        "## What you conclude",
        "In five sentences at most, for somebody who has to choose one of the four.",
        BLANK,
    ]
    return "\n\n".join(parts) + "\n"


def find_runs(folder: Path) -> list[tuple[Path, Summary]]:
    """The folders of the four tasks' runs in `folder`, with their summaries, in the tasks' order. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the one with the four tasks' runs.")
    patterns = ["/".join(["*"] * depth + [SUMMARY_FILE]) for depth in range(1, DEEPEST + 1)]
    places = sorted(place for pattern in patterns for place in folder.glob(pattern))
    found = [(place.parent, load_run(place.parent)) for place in places]
    found = [
        (place, run | {"run": str(place.relative_to(folder))}) for place, run in found if run.get("label") in TASKS
    ]
    missing = [task for task in TASKS if task not in {run["label"] for _, run in found}]
    if missing:
        raise UserError(
            f"{folder} has no finished run of {listed(missing)}. Run {'each' if len(missing) > 1 else 'the'} "
            f"task's script with --output_dir {listed([folder / task for task in missing])}."
        )
    return sorted(found, key=lambda pair: TASKS.index(pair[1]["label"]))


def _setting_rows(runs: Sequence[Summary]) -> list[list[str]]:
    rows = [["run", "sync", "ranks", "task", "model", "examples per step", "precision", "link", "processor"]]
    for run in runs:
        network = run["network"] or {}
        link = ", ".join(str(network[name]) for name in ("rate", "delay") if network.get(name)) or "-"
        what = [run["run"], run["sync"], str(run["world_size"]), run["task"], run["model"]]
        what += [str(run["total_train_batch_size"]), run["precision"], link]
        rows.append([*what, str(run["ground"].get("processor") or "-")])
    return rows


def _seconds_rows(runs: Sequence[tuple[Path, Summary]]) -> list[list[str]]:
    """Per run: the first iteration's seconds, the mean of the others', its ratio to task 3's, and seconds by phase."""
    figures = [_figures(folder) for folder, _ in runs]
    pairs = [(run, mean) for (_, run), (_, mean, _) in zip(runs, figures, strict=True) if run["label"] == TASKS[-1]]
    task3, last = pairs[0]
    rows = [["run", "iterations", "first s", "mean s of the others", f"times {TASKS[-1]}'s", *PHASES]]
    for (_, run), (first, mean, phases) in zip(runs, figures, strict=True):
        ratio = cell(mean / last if mean and last else None, ".2f")
        ratio = DISTURBED if ratio != "-" and any(is_disturbed(one) for one in (run, task3)) else ratio
        cells = [cell(first, ".3f"), cell(mean, ".3f"), ratio, *(cell(each, ".3f") for each in phases)]
        rows.append([run["run"], str(run["iterations"]), *cells])
    return rows


def _figures(folder: Path) -> tuple[float | None, float | None, list[float | None]]:
    """Rank 0's seconds of the first iteration, the mean of the others', and the means of their phases."""
    rows = list(iteration_rows(folder))
    first, others = rows[0]["seconds"] if rows else None, rows[1:]
    phases = [_mean([row.get(f"seconds_{phase}", 0.0) for row in others]) for phase in PHASES]
    return first, _mean([row["seconds"] for row in others]), phases


def _metric_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """For each epoch of each run, the loss and every metric that any run has."""
    epochs = [(run, epoch) for run in runs for epoch in run.get("epochs", [])]
    names = ["loss", *metric_names(epoch for _, epoch in epochs)]
    rows = [["run", "epoch", *names]]
    for run, epoch in epochs:
        rows.append([run["run"], number_in_words(epoch, run), *(cell(epoch.get(name), ".4f") for name in names)])
    return rows


def _questions(section: str) -> list[str]:
    return [part for question in QUESTIONS[section] for part in (question, BLANK)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
