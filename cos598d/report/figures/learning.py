"""Figures of what the model learns: the metric by epoch, the loss by iteration and by time."""

from collections.abc import Sequence
from itertools import accumulate

from cos598d.report.load import Run, is_number
from cos598d.report.numbers import listed
from cos598d.report.svg import draw, legend_below, line_style

NOT_METRICS = frozenset(("epoch", "iterations", "loss", "seconds_evaluation"))
MOST_POINTS = 300


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


def metric_figure(runs: Sequence[Run], metric: str, name: str) -> str | None:
    """A metric after each epoch; None where no run has two epochs of it."""
    series = {
        run.name: [(epoch["epoch"], epoch[metric]) for epoch in run.summary["epochs"] if is_number(epoch.get(metric))]
        for run in runs
    }
    if all(len(points) < 2 for points in series.values()):
        return None

    def paint(figure):
        axes = figure.subplots()
        handles = []
        for place, points in enumerate(series.values()):
            handles += axes.plot(*(zip(*points) if points else ([], [])), **line_style(place))
        axes.set_xlabel("epoch")
        axes.set_title(metric, loc="left")
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_below(figure, handles, list(series))

    return draw(name, f"{metric} after each epoch of {listed(list(series))}", 200, paint)


def loss_figure(runs: Sequence[Run]) -> str | None:
    """Two panels, the loss against the iteration and against the training's seconds; None without two iterations."""
    runs = [run for run in runs if run.iterations and len(run.iterations[0]) > 1]
    if not runs:
        return None

    def paint(figure):
        above, below = figure.subplots(2, 1, sharey=True)
        handles = []
        for place, run in enumerate(runs):
            rows, size = run.iterations[0], points_per_block(run)
            losses = _block_means([row["loss"] for row in rows], size)
            style = line_style(place) | {"markevery": (place % 5, max(5, len(losses) // 8)), "markersize": 4}
            handles += above.plot(_block_means([row["iteration"] for row in rows], size), losses, **style)
            below.plot(_block_means(list(accumulate(row["seconds"] for row in rows)), size), losses, **style)
        above.set_title("loss against iteration", loc="left")
        above.set_xlabel("iteration")
        above.xaxis.get_major_locator().set_params(integer=True)
        below.set_title("loss against time", loc="left")
        below.set_xlabel("seconds of training")
        below.set_xlim(left=0)
        legend_below(figure, handles, [run.name for run in runs])

    label = f"loss against iteration and against time of {listed([run.name for run in runs])}"
    return draw("loss", label, 360, paint)


def points_per_block(run: Run) -> int:
    """How many iterations one point of a long run's curve stands for, as their mean."""
    return -(-len(run.iterations[0]) // MOST_POINTS)


def _block_means(values: Sequence[float], size: int) -> list[float]:
    blocks = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(block) / len(block) for block in blocks]
