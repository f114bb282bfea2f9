"""The page's part on what the models learn: metrics by epoch, training against validation loss, the first losses."""

from collections.abc import Sequence

from cos598d.report import captions
from cos598d.report.blocks import Block, Table, figures
from cos598d.report.figures import learning
from cos598d.report.figures.overfitting import overfitting_figure
from cos598d.report.load import Run, is_number
from cos598d.report.numbers import plain
from cos598d.report.overfitting import courses, overfitting_caption
from cos598d.report.table import losses_rows

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
            values = {epoch["epoch"]: epoch.get(metric) for epoch in run.summary["epochs"]}
            rows.append([run.name, *(f"{values[e]:.4f}" if is_number(values.get(e)) else "-" for e in epochs)])
        name = f"metric{number}"
        svg = learning.metric_figure(runs, metric, name)
        blocks.append(Table(f"{metric} after each epoch.", rows))
        blocks += figures((name, svg, captions.metric_caption(runs, metric)))
    return blocks


def speeds(runs: Sequence[Run]) -> list[Block]:
    """The seconds of each epoch's training and evaluation, and how fast it was trained: a table and figures."""
    blocks: list[Block] = []
    rows = [["run", "epoch", *learning.SPEEDS]]
    for run in runs:
        values = [learning.epoch_values(run, speed) for speed in learning.SPEEDS]
        for epoch in run.summary["epochs"]:
            cells = [plain(found[epoch["epoch"]]) if epoch["epoch"] in found else "-" for found in values]
            if any(cell != "-" for cell in cells):
                rows.append([run.name, str(epoch["epoch"]), *cells])
    used = [place for place in range(len(rows[0])) if any(row[place] != "-" for row in rows[1:])]
    if 1 < len(rows) <= MOST_EPOCHS:
        note = "By the wall, evaluation apart from training; tokens are counted without padding."
        blocks.append(Table(note, [[row[place] for place in used] for row in rows]))
    for number, speed in enumerate(learning.SPEEDS):
        name = f"speed{number}"
        svg = learning.metric_figure(runs, speed, name, begins_at_zero=True)
        blocks += figures((name, svg, captions.speed_caption(runs, speed)))
    return blocks


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
            is_best = "lowest" if point is course.best else ""
            rows.append([course.run.name, point.when, training, f"{point.validation:.4f}", is_best])
    note = "Training loss: the mean over the iterations since the evaluation before, with dropout where there is any."
    return [Table(note, rows), *figures(("overfitting", overfitting_figure(found), overfitting_caption(found)))]
