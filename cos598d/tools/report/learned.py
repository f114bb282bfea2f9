"""The page's part on what the models learn: metrics by epoch, training against validation loss, the first losses."""

from collections.abc import Sequence

from cos598d.tools.report import captions
from cos598d.tools.report.attempts import kept_another
from cos598d.tools.report.blocks import Block, Table, figures
from cos598d.tools.report.epochs import is_cut, number_in_words
from cos598d.tools.report.figures import learning
from cos598d.tools.report.figures.overfitting import overfitting_figure
from cos598d.tools.report.load import Run, is_number
from cos598d.tools.report.numbers import names_of, plain
from cos598d.tools.report.overfitting import courses, overfitting_caption
from cos598d.tools.report.table import losses_rows

MOST_EPOCHS = 100  # rows of a table; the figures have them all


def metrics(runs: Sequence[Run]) -> list[Block]:
    """A table and a figure of each metric after each epoch."""
    blocks: list[Block] = []
    for number, metric in enumerate(learning.metric_names(runs)):
        epochs = sorted(
            {epoch["epoch"] for run in runs for epoch in run.summary["epochs"] if is_number(epoch.get(metric))}
        )
        rows = [["run", *(f"epoch {epoch}" for epoch in epochs)]]
        for run in runs:
            cells = {
                epoch["epoch"]: f"{epoch[metric]:.4f}{' (cut)' if is_cut(epoch, run.summary) else ''}"
                for epoch in run.summary["epochs"]
                if is_number(epoch.get(metric))
            }
            rows.append([run.name, *(cells.get(epoch, "-") for epoch in epochs)])
        name = f"metric{number}"
        svg = learning.metric_figure(runs, metric, name)
        blocks.append(Table(f"{metric} after each epoch.{cut_note(runs)}{kept_note(runs)}", rows))
        blocks += figures((name, svg, captions.metric_caption(runs, metric)))
    return blocks


def speeds(runs: Sequence[Run]) -> list[Block]:
    """The seconds of each epoch's training and evaluation, and how fast it was trained: a table and figures."""
    blocks: list[Block] = []
    rows = [["run", "epoch", *learning.SPEEDS]]
    for run in runs:
        values = [learning.epoch_values(run, speed, whole=False) for speed in learning.SPEEDS]
        for epoch in run.summary["epochs"]:
            cells = [plain(found[epoch["epoch"]]) if epoch["epoch"] in found else "-" for found in values]
            if any(cell != "-" for cell in cells):
                rows.append([run.name, number_in_words(epoch, run.summary), *cells])
    used = [place for place in range(len(rows[0])) if any(row[place] != "-" for row in rows[1:])]
    if 1 < len(rows) <= MOST_EPOCHS:
        note = f"By the wall, evaluation apart from training; tokens are counted without padding.{cut_note(runs)}"
        blocks.append(Table(note, [[row[place] for place in used] for row in rows]))
    for number, speed in enumerate(learning.SPEEDS):
        name = f"speed{number}"
        svg = learning.metric_figure(runs, speed, name, begins_at_zero=True)
        blocks += figures((name, svg, captions.speed_caption(runs, speed)))
    return blocks


def cut_note(runs: Sequence[Run]) -> str:
    """A sentence on epochs that were cut, with a blank before it; "" where all are whole."""
    if not any(is_cut(epoch, run.summary) for run in runs for epoch in run.summary["epochs"]):
        return ""
    return " Cut: the training ended within that epoch, so the figures by epoch leave it out."


def kept_note(runs: Sequence[Run]) -> str:
    """A sentence on runs that kept another model than that of their end, with a blank before it; "" of none."""
    names = [run.name for run in runs if kept_another(run)]
    return f" Of the model that was trained last: {names_of(names, 'run')} kept an earlier one." if names else ""


def first_losses(runs: Sequence[Run]) -> list[Table]:
    """The first losses, and how far they are from those of one rank."""
    trained = [run.summary for run in runs if run.summary["losses"]]
    if not trained:
        return []
    return [
        Table(
            "The global batch's loss in the first three iterations. A difference to one rank is over all iterations.",
            losses_rows(trained),
        )
    ]


def overfitting(runs: Sequence[Run]) -> list[Block]:
    """Training against validation loss of the runs that were validated more than once, and where the second turns."""
    found = courses(runs)
    if not found:
        return []
    rows = [["run", "evaluated", "training loss", "validation loss", ""]]
    for course in found:
        for point in course.points:
            training = "-" if point.training is None else f"{point.training:.4f}"
            is_best = "lowest" if point is course.best and not course.is_flat else ""
            rows.append([course.run.name, point.when, training, f"{point.validation:.4f}", is_best])
    note = "Training loss: the mean over the examples since the evaluation before, with dropout where there is any."
    picture = "overfitting", overfitting_figure(found), overfitting_caption(found)
    blocks: list[Block] = [Table(note, rows), *figures(picture)]
    drawn = {course.run.name for course in found}
    absent = [run.name for run in runs if run.summary["losses"] and run.name not in drawn]
    if absent:
        why = "with fewer than two evaluations (one after a cut epoch counts only where --eval_steps asks for it)"
        blocks.append(f"Left out, {why}: {names_of(absent, 'run')}.")
    return blocks
