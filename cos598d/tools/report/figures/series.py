"""Figures of series of runs: traffic predicted and counted, scaling, and sweeps of a setting."""

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from cos598d.terminal.colours import BLUE, DARK_GREY, SKY
from cos598d.terminal.words import listed
from cos598d.tools.report.load import Run
from cos598d.tools.report.settings import UNITS, series_name, value_in
from cos598d.tools.report.svg import draw, lanes, legend_below, line_style, swept_axis
from cos598d.tools.report.traffic import Traffic


def traffic_figure(traffic: Sequence[Traffic]) -> str | None:
    """Bytes sent an iteration, predicted and counted, side by side; None where nothing was counted.

    Neighbours of one run of which the same is predicted share a lane, with the mean of what was counted.
    """
    if not traffic:
        return None
    groups = [list(group) for _, group in groupby(traffic, key=lambda one: (one.run, one.predicted_sent))]
    names = [f"{group[0].run}, {_whose(group)}" for group in groups]

    def paint(figure):
        axes = figure.subplots()
        predicted = axes.barh(
            [place + 0.02 for place in range(len(groups))],
            [group[0].predicted_sent / 1e6 for group in groups],
            0.24,
            color=SKY,
        )
        counted = axes.barh(
            [place + 0.28 for place in range(len(groups))],
            [fmean(one.counted_sent for one in group) / 1e6 for group in groups],
            0.24,
            color=BLUE,
            hatch="///",
            edgecolor="white",
        )
        lanes(axes, names, -0.25)
        axes.set_xlabel("MB sent an iteration")
        legend_below(figure, [predicted, counted], ["predicted", "counted"])

    label = "bytes sent an iteration, predicted and counted"
    return draw("traffic", label, 50 + 36 * len(groups), paint)


def _whose(group: Sequence[Traffic]) -> str:
    return group[0].whose if len(group) == 1 else f"{group[0].whose} to {group[-1].whose}, each"


def scaling_figure(series: Sequence[tuple[Run, list[Run]]]) -> str | None:
    """Speed-up against the number of ranks, with the line of as many times as fast as there are ranks."""
    if not series:
        return None

    def paint(figure):
        axes = figure.subplots()
        most = max(run.summary["world_size"] for _, runs in series for run in runs)
        handles = axes.plot([1, most], [1, most], color=DARK_GREY, linestyle=":")
        for place, (base, runs) in enumerate(series):
            ranks = [1, *(run.summary["world_size"] for run in runs)]
            ratios = [1, *(base.seconds["mean"] / run.seconds["mean"] for run in runs)]
            handles += axes.plot(ranks, ratios, **line_style(place))
        axes.set_xlabel("ranks")
        axes.set_title("speed-up over one rank", loc="left")
        axes.set_xticks(sorted({1, *(run.summary["world_size"] for _, runs in series for run in runs)}))
        axes.set_ylim(bottom=0)
        every = [runs for _, runs in series]
        legend_below(figure, handles, ["n ranks, n times", *(series_name(runs, every) for runs in every)])

    return draw("scaling", "speed-up against the number of ranks", 220, paint)


def sweep_figure(word: str, series: Sequence[list[Run]], name: str) -> str:
    """Seconds an iteration, with their 95 % intervals, against the setting `word`, a line for each series."""
    unit, _ = UNITS[word]

    def paint(figure):
        axes = figure.subplots()
        handles = []
        for place, runs in enumerate(series):
            means = [run.seconds["mean"] for run in runs]
            below = [run.seconds["mean"] - (run.seconds["interval_95"] or [run.seconds["mean"]])[0] for run in runs]
            values = [value_in(run, word) for run in runs]
            handles.append(axes.errorbar(values, means, yerr=below, capsize=3, **line_style(place)))
        swept_axis(axes, sorted({value_in(run, word) for runs in series for run in runs}))
        axes.set_xlabel(unit)
        axes.set_title("seconds an iteration", loc="left")
        axes.set_ylim(bottom=0)
        legend_below(figure, handles, [series_name(runs, series) for runs in series])

    return draw(
        name,
        f"seconds an iteration against {word} of {listed([runs[0].summary['sync'] for runs in series])}",
        220,
        paint,
    )
