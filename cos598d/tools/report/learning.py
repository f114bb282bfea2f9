"""The page's part on what models learn: metrics and speed by epoch, the first losses, loss by iteration and time."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from cos598d.records.conventions import COUNTED
from cos598d.terminal.words import listed
from cos598d.tools.report.blocks import Block, Figure, Table, figures
from cos598d.tools.report.epochs import cut_note, is_cut, kept_another, metric_names, number_in_words, whole_epochs
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import is_number, names_of, plain
from cos598d.tools.report.references import drifts, grouped, has_all_rows, same_setting
from cos598d.tools.report.svg import draw, legend_below, line_style
from cos598d.tools.report.table import losses_rows

MOST_EPOCHS = 100  # rows of a table; the figures have them all
MOST_POINTS = 300
# How long an epoch took and how fast it was, by the page's words: where its row has it, and under which name.
SPEEDS = {
    "seconds of training": ("training", "wall_seconds"),
    "seconds of evaluation": ("", "seconds_evaluation"),
    **{f"{name} per second": ("training", f"{name}_per_second_wall") for name in ("examples", *COUNTED)},
}


def metrics_blocks(runs: Sequence[Run]) -> list[Block]:
    """A table and a figure of each metric after each epoch."""
    metrics = metric_names(epoch for run in runs for epoch in run.summary["epochs"])
    names = [run.name for run in runs if kept_another(run)]
    kept_note = f" Of the model that was trained last: {names_of(names, 'run')} kept an earlier one." if names else ""
    blocks: list[Block] = []
    for number, metric in enumerate(metrics):
        values = {run.name: epoch_values(run, metric, whole=False) for run in runs}
        epochs = sorted({epoch for found in values.values() for epoch in found})
        rows = [["run", *(f"epoch {epoch}" for epoch in epochs)]]
        for run in runs:
            if not values[run.name]:
                continue
            cut = {epoch["epoch"]: " (cut)" for epoch in run.summary["epochs"] if is_cut(epoch, run.summary)}
            found = values[run.name]
            cells = (f"{found[epoch]:.4f}{cut.get(epoch, '')}" if epoch in found else "-" for epoch in epochs)
            rows.append([run.name, *cells])
        notes = "" if number else cut_note(runs) + kept_note  # once, of all metrics
        blocks.append(Table(f"{metric} after each epoch.{notes}", rows))
        blocks += figures((f"metric{number}", _epochs_figure(runs, metric, f"metric{number}"), []))
    return blocks


def speed_blocks(runs: Sequence[Run]) -> list[Block]:
    """The seconds of each epoch's training and evaluation, and how fast it was trained: a table and figures."""
    blocks: list[Block] = []
    rows = [["run", "epoch", *SPEEDS]]
    for run in runs:
        values = [epoch_values(run, speed, whole=False) for speed in SPEEDS]
        for epoch in run.summary["epochs"]:
            cells = [plain(found[epoch["epoch"]]) if epoch["epoch"] in found else "-" for found in values]
            if any(cell != "-" for cell in cells):
                rows.append([run.name, number_in_words(epoch, run.summary), *cells])
    used = [place for place in range(len(rows[0])) if any(row[place] != "-" for row in rows[1:])]
    has_table = 1 < len(rows) <= MOST_EPOCHS
    if has_table:
        note = f"Wall-clock time; evaluation is separate from training. Tokens exclude padding.{cut_note(runs)}"
        blocks.append(Table(note, [[row[place] for place in used] for row in rows]))
    cut = [note.strip()] if (note := cut_note(runs)) else []
    for number, speed in enumerate(SPEEDS):
        svg = _epochs_figure(runs, speed, f"speed{number}", begins_at_zero=True)
        blocks += figures((f"speed{number}", svg, [] if has_table else cut))
    return blocks


def first_losses(runs: Sequence[Run]) -> list[Table]:
    """The first losses, and how far they are from those of one rank."""
    trained = [run.summary for run in runs if run.summary["losses"]]
    note = "The global batch's loss in the first three iterations. A difference to one rank is over all iterations."
    return [Table(note, losses_rows(trained))] if trained else []


def loss_blocks(runs: Sequence[Run]) -> list[Figure]:
    """The loss against the iteration and against time, and how far runs of one setting are apart."""
    trained = [run for run in runs if len(run.summary["losses"]) > 1]
    caption = [
        f"In the same iteration, the losses of {listed([run.name for run in group])} are {losses_apart(group)}."
        for group in of_one_setting(trained)
        if len(group) > 1
    ]
    most = max((points_per_block(run) for run in trained), default=1)
    if most > 1:
        caption.append(f"A point of a long run's curve is the mean of up to {most} iterations.")
    return figures(("loss", _loss_figure(runs), [*caption, "Time is rank 0's in iterations; evaluation is not in it."]))


def of_one_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose losses can be compared; replicas that do not agree in every step are left out."""
    comparable = [run for run in runs if not drifts(run.summary) and has_all_rows(run.summary)]
    return grouped(comparable, lambda first, run: same_setting(first.summary, run.summary))


def losses_apart(group: Sequence[Run]) -> str:
    """How far the losses of these runs are apart in one iteration at the most."""
    apart = max(max(found) - min(found) for found in zip(*(run.summary["losses"] for run in group)))
    return f"at most {apart:.1e} apart" if apart else "the same to the last digit"


def epoch_values(run: Run, metric: str, whole: bool = True) -> dict[int, float]:
    """A metric, or one of SPEEDS, by epoch; with `whole` without those that were cut."""
    place, key = SPEEDS.get(metric, ("", metric))
    found = {}
    for epoch in whole_epochs(run.summary) if whole else run.summary["epochs"]:
        value: Any = epoch.get(place, {}).get(key) if place else epoch.get(key)
        if is_number(value):
            found[epoch["epoch"]] = value
    return found


def points_per_block(run: Run) -> int:
    """How many iterations one point of a long run's curve stands for, as their mean."""
    return -(-len(run.series) // MOST_POINTS)


def block_means(values: Sequence[float], size: int) -> list[float]:
    """The means of so many values after one another, of the last ones as many as there are."""
    blocks = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(block) / len(block) for block in blocks]


def _epochs_figure(runs: Sequence[Run], metric: str, name: str, begins_at_zero: bool = False) -> str | None:
    """A metric, or one of SPEEDS, after each whole epoch; None where no run has two of them."""
    found = [(line_style(place), run.name, epoch_values(run, metric)) for place, run in enumerate(runs)]
    lines = [(style, name, points) for style, name, points in found if points]
    if all(len(points) < 2 for *_, points in lines):
        return None

    def paint(figure):
        axes = figure.subplots()
        handles = []
        for style, _, points in lines:
            handles += axes.plot(list(points), list(points.values()), **style)
        axes.set_xlabel("epoch")
        axes.set_title(metric, loc="left")
        if begins_at_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_below(figure, handles, [name for _, name, _ in lines])

    return draw(name, f"{metric} after each epoch of {listed([run for _, run, _ in lines])}", 200, paint)


def _loss_figure(runs: Sequence[Run]) -> str | None:
    """Panels, the loss against the iteration and against the training's seconds, and the learning rate where the rows
    have it; None without two iterations."""
    runs = [run for run in runs if len(run.series) > 1]
    if not runs:
        return None
    has_rates = any(run.series.rates for run in runs)

    def paint(figure):
        above, below, *rest = figure.subplots(2 + has_rates, 1, height_ratios=[1, 1, 0.5][: 2 + has_rates])
        below.sharey(above)
        handles = []
        for place, run in enumerate(runs):
            series, size = run.series, points_per_block(run)
            losses, iterations = block_means(series.losses, size), block_means(series.iterations, size)
            style = line_style(place) | {"markevery": (place % 5, max(5, len(losses) // 8)), "markersize": 4}
            handles += above.plot(iterations, losses, **style)
            below.plot(block_means(list(accumulate(series.seconds)), size), losses, **style)
            if series.rates:
                rest[0].plot(iterations, block_means(series.rates, size), **style)
        below.set_title("loss against time", loc="left")
        below.set_xlabel("seconds of training")
        below.set_xlim(left=0)
        for axes, what in ((above, "loss"), *((axes, "learning rate") for axes in rest)):
            axes.set_title(f"{what} against iteration", loc="left")
            axes.set_xlabel("iteration")
            axes.xaxis.get_major_locator().set_params(integer=True)
        if rest:
            rest[0].set_ylim(bottom=0)
        legend_below(figure, handles, [run.name for run in runs])

    label = f"loss against iteration and against time of {listed([run.name for run in runs])}"
    return draw("loss", label, 360 + 110 * has_rates, paint)
