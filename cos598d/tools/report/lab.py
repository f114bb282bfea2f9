"""A lab's report to fill in: the four tasks' figures from their records only, with blanks for your answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from cos598d.errors import WARNING, UserError
from cos598d.records.conventions import ITERATIONS, PHASES, SUMMARY
from cos598d.records.schema import Iteration, read_rows
from cos598d.terminal.tables import as_markdown, markdown_text
from cos598d.terminal.words import listed
from cos598d.tools.report.busy import DISTURBED
from cos598d.tools.report.cells import Rows, texts
from cos598d.tools.report.compare import APART, alone_of, in_groups, losses_apart
from cos598d.tools.report.records import Run, load_run
from cos598d.tools.report.tables import TRAFFIC, epoch_rows, traffic_rows
from cos598d.tools.report.verdict import warnings

# The label that a task's script gives its run, in the record.
TASKS = ("task1", "task2a", "task2b", "task3")
BLANK = "> *Your answer:*"
# Each section's title, what its table says, and the questions after it.
SECTIONS = {
    "Losses": (
        "The global batch's loss in the first iterations; the difference is the largest of all iterations.",
        "By how much do the losses of tasks 2(a), 2(b) and 3 differ from those of task 1, and why by no more, and no "
        "less?",
    ),
    "Seconds per iteration": (
        "The first iteration has its own column. The other figures are means over the rest, on rank 0. DDP's calls run "
        "during backward and have no phase of their own.",
        "Which task is the fastest, by how much, and in which phase does it gain that time?",
        "Why is the first iteration left out? Would you leave out more?",
        "How many times as fast as task 1 is each of the others, and why is it not as many times as there are ranks?",
    ),
    "Bytes": (
        f"{TRAFFIC} Payload is the size of all gradients. MB: 1,000,000 bytes, of every iteration, the first one too.",
        "S is the gradient's size (payload), n the number of ranks. Write down, for each task, the bytes that rank 0 "
        "sends in an iteration, and the others, as formulas of n and S. Do they agree with the table?",
        "Two tasks may send the same bytes and still take different times. What else costs time?",
        "What would change with eight ranks? With links of a tenth of the rate?",
    ),
    "Accuracy": (
        "An epoch is marked as cut where the training ended within it: its loss is the mean of fewer steps.",
        "Should the tasks come to the same accuracy? Do they? What would you look at if one did not?",
    ),
}


def lab_page(folder: Path) -> str:
    """The report, in Markdown, of the runs in `folder`; their records name their task.

    Seconds exclude only the first iteration, as the lab asks. Raises UserError if a task has no record there, or one
    that cannot be read.
    """
    runs = find_runs(folder)
    found = (_loss_rows(runs), _seconds_rows(runs), traffic_rows(runs), epoch_rows(runs))
    parts = [
        "# Lab report: four ways to share one step",
        "Name: ........................................ Date: ....................",
        "The tables are made from the runs' records. Write below each question.",
        "## The runs",
        as_markdown(texts(_setting_rows(runs))),
        *(markdown_text(f"{WARNING}{sentence}") for sentence in warnings(runs)),
        "> *Your hosts, and how they are joined:*",
    ]
    for (title, (note, *questions)), rows in zip(SECTIONS.items(), found, strict=True):
        parts += [f"## {title}", as_markdown(texts(rows)), note]
        parts += [part for question in questions for part in (question, BLANK)]
    parts += [
        "## What you conclude",
        "In five sentences at most, for somebody who has to choose one of the four.",
        BLANK,
    ]
    return "\n\n".join(parts) + "\n"


def find_runs(folder: Path) -> list[Run]:
    """The four tasks' runs in `folder`, up to two folders down, in the tasks' order. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the one with the four tasks' runs.")
    places = sorted(place.parent for pattern in ("*", "*/*") for place in folder.glob(f"{pattern}/{SUMMARY}"))
    found = [replace(load_run(place), name=str(place.relative_to(folder))) for place in places]
    found = [run for run in found if run.summary.label in TASKS]
    missing = [task for task in TASKS if task not in {run.summary.label for run in found}]
    if missing:
        raise UserError(
            f"{folder} has no finished run of {listed(missing)}. Run {'each' if len(missing) > 1 else 'the'} "
            f"task's script with --output_dir {listed([folder / task for task in missing])}."
        )
    return sorted(found, key=lambda run: TASKS.index(run.summary.label))


def _setting_rows(runs: Sequence[Run]) -> Rows:
    found = []
    for run in runs:
        summary, ground = run.summary, run.environment
        row = {"run": run.name, "sync": summary.sync, "ranks": summary.world_size, "task": summary.task}
        row |= {"model": summary.model, "examples per step": summary.total_train_batch_size}
        row |= {name: getattr(ground.network, name) for name in ("rate", "delay")} if ground.network else {}
        found.append(row | {"precision": summary.precision, "processor": ground.processor})
    return found


def _loss_rows(runs: Sequence[Run]) -> Rows:
    groups = in_groups(runs)
    return [
        {"run": run.name, "iterations": run.summary.iterations}
        | {f"loss {number}": f"{loss:.6f}" for number, loss in enumerate(run.summary.losses[:3], start=1)}
        | {APART: losses_apart([run], alone_of(groups, [run]))}
        for run in runs
    ]


def _seconds_rows(runs: Sequence[Run]) -> Rows:
    """The first iteration's seconds, the mean of the others', its ratio to task 3's, and seconds by phase."""
    rows = {run.name: list(read_rows(run.folder / ITERATIONS.format(rank=0), Iteration)) for run in runs}

    def mean(run: Run, name: str) -> float | None:
        found = [getattr(row, name) for row in rows[run.name][1:]]
        return fmean(found) if found else None

    last, found = next(run for run in runs if run.summary.label == TASKS[-1]), []
    for run in runs:
        own, base = mean(run, "seconds"), mean(last, "seconds")
        ratio = own / base if own and base else None
        row = {"run": run.name, "first s": rows[run.name][0].seconds if rows[run.name] else None}
        row |= {"mean s of the others": own, f"times {TASKS[-1]}'s": DISTURBED if run.busy or last.busy else ratio}
        found.append(row | {phase: mean(run, f"seconds_{phase}") for phase in PHASES})
    return found
