"""Figures of what the model learns: the metric by epoch, the loss by iteration and by time."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from cos598d.records.conventions import COUNTED, NOT_METRICS
from cos598d.terminal.words import listed
from cos598d.tools.report.epochs import whole_epochs
from cos598d.tools.report.load import Run, is_number
from cos598d.tools.report.svg import draw, legend_below, line_style

MOST_POINTS = 300
# How long an epoch took and how fast it was, by the page's words: where its row has it, and under which name.
SPEEDS = {
    "seconds of training": ("training", "wall_seconds"),
    "seconds of evaluation": ("", "seconds_evaluation"),
    **{f"{name} a second": ("training", f"{name}_per_second_wall") for name in ("examples", *COUNTED)},
}


def metric_names(runs: Sequence[Run]) -> list[str]:
    """The metrics that the runs' evaluations have, in their order."""
    return list(
        dict.fromkeys(
            name
            for run in runs
            for epoch in run.summary["epochs"]
            for name, value in epoch.items()
            if name not in NOT_METRICS and is_number(value)
        )
    )


def epoch_values(run: Run, metric: str, whole: bool = True) -> dict[int, float]:
    """A metric, or one of SPEEDS, by epoch; with `whole` without those that were cut."""
    place, key = SPEEDS.get(metric, ("", metric))
    found = {}
    for epoch in whole_epochs(run.summary) if whole else run.summary["epochs"]:
        value: Any = epoch.get(place, {}).get(key) if place else epoch.get(key)
        if is_number(value):
            found[epoch["epoch"]] = value
    return found


def metric_figure(runs: Sequence[Run], metric: str, name: str, begins_at_zero: bool = False) -> str | None:
    """A metric, or one of SPEEDS, after each whole epoch; None where no run has two of them."""
    series = {run.name: list(epoch_values(run, metric).items()) for run in runs}
    if all(len(points) < 2 for points in series.values()):
        return None

    def paint(figure):
        axes = figure.subplots()
        handles = []
        for place, points in enumerate(series.values()):
            handles += axes.plot(*(zip(*points) if points else ([], [])), **line_style(place))
        axes.set_xlabel("epoch")
        axes.set_title(metric, loc="left")
        if begins_at_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_below(figure, handles, list(series))

    return draw(name, f"{metric} after each epoch of {listed(list(series))}", 200, paint)


def loss_figure(runs: Sequence[Run]) -> str | None:
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


def points_per_block(run: Run) -> int:
    """How many iterations one point of a long run's curve stands for, as their mean."""
    return -(-len(run.series) // MOST_POINTS)


def block_means(values: Sequence[float], size: int) -> list[float]:
    """The means of so many values after one another, of the last ones as many as there are."""
    blocks = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(block) / len(block) for block in blocks]
