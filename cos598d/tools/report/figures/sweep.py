"""Figures of a sweep: a measure against an axis, and all combinations by their seconds and what they come to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cos598d.terminal.colours import BLACK, DARK_GREY, SERIES
from cos598d.tools.report.svg import MARKERS, draw, legend_below, line_style, shortened
from cos598d.tools.report.sweep_entries import BATCH, SETUP, SeedGroup, axes_of, varying
from cos598d.tools.report.sweep_lines import EVEN, Axis, Chart, Line
from cos598d.tools.report.sweep_measures import SPEED_UP, Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What the values of an axis count.
UNITS = {BATCH: "batch (examples on each rank)", SETUP: "setup (hosts x ranks on each)"}
LEVEL = 1.0  # where a speed-up is none
# Letters that have room side by side under a plot, with spaces between the words.
LETTERS = 42


def chart_figure(chart: Chart, name: str) -> str:
    """The means against the axis, each with a bar from the least of its seeds to the most."""
    panels = chart.panels
    styles = {words: place for place, words in enumerate(dict.fromkeys(_name(chart, line) for line in chart.lines))}

    def paint(figure):
        axes_of_panels = figure.subplots(len(panels), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        handles = {}
        for axes, (title, lines) in zip(axes_of_panels, panels.items(), strict=True):
            for place, line in enumerate(lines):
                words = _name(chart, line)
                aside = _aside(chart.axis, place, len(lines))
                handles[words] = _line(axes, chart.axis, line, line_style(styles[words]), aside)
            axes.set_title(shortened(", ".join(filter(None, (chart.measure.title, title))), 46), loc="left")
            if chart.measure.title == SPEED_UP:
                axes.axhline(LEVEL, color=DARK_GREY, linestyle=":")
        # Not sooner: the panels share their scale, and a limit would keep out what comes after it.
        if chart.measure.begins_at_zero:
            axes_of_panels[0].set_ylim(0, 1.05 * axes_of_panels[0].get_ylim()[1])
        _ticks(axes_of_panels[-1], chart.axis)
        if len(handles) > 1 or any(handles):
            legend_below(figure, list(handles.values()), list(handles))

    return draw(name, f"{chart.measure.title} against {chart.axis.name}", 50 + 150 * len(panels), paint)


def overview_figure(combinations: Sequence[SeedGroup], across: Measure, up: Measure) -> str | None:
    """Each combination at its seconds and its metric: the colour tells the first axis' value, the marker the second's.

    None where fewer than two combinations have both.
    """
    points = [(one, x, y) for one in combinations if (x := across.spread(one)) and (y := up.spread(one))]
    if len(points) < 2:
        return None
    axes_words = axes_of([one for one, *_ in points])
    shown = varying(axes_words)[:2]

    def look(one: SeedGroup, place: int) -> int:
        word = one.settings.get(shown[place]) if len(shown) > place else None
        return axes_words[shown[place]].index(word) if word is not None else 0

    def paint(figure):
        axes = figure.subplots()
        for one, x, y in points:
            colour = SERIES[look(one, 0) % len(SERIES)]
            marker = MARKERS[look(one, len(shown) - 1) % len(MARKERS)]
            axes.errorbar(
                *(x.mean, y.mean),
                yerr=[[y.mean - y.least], [y.most - y.mean]],
                xerr=[[x.mean - x.least], [x.most - x.mean]],
                fmt=marker,
                color=colour,
                elinewidth=0.8,
                markersize=6,
            )
        axes.set_xlim(left=0)
        axes.set_xlabel(across.title)
        axes.set_title(up.title, loc="left")
        handles, labels = [], []
        for place, axis in enumerate(shown):
            for number, word in enumerate(axes_words[axis]):
                colour = SERIES[number % len(SERIES)] if place == 0 else BLACK
                marker = MARKERS[number % len(MARKERS)] if place == len(shown) - 1 else MARKERS[0]
                handles += axes.plot([], [], marker, color=colour, markersize=6)
                labels.append(f"{axis} {word}")
        legend_below(figure, handles, labels)

    return draw("answer", f"{up.title} against {across.title}", 210, paint)


def _name(chart: Chart, line: Line) -> str:
    return line.words(chart.line_axes)


def _aside(axis: Axis, place: int, count: int) -> float:
    """How far beside its value a line's points stand, where places are one apart, so that none hides another's."""
    is_even = not axis.is_numeric or axis.scale == EVEN
    return min(0.08, 0.5 / count) * (place - (count - 1) / 2) if is_even else 0.0


def _line(axes: "Axes", axis: Axis, line: Line, style: dict, aside: float):
    spreads = list(line.points.values())
    return axes.errorbar(
        [axis.places[word] + aside for word in line.points],
        [spread.mean for spread in spreads],
        yerr=[[one.mean - one.least for one in spreads], [one.most - one.mean for one in spreads]],
        capsize=2,
        elinewidth=0.8,
        # Between words there is nothing for a line to lead over.
        **(style if axis.is_numeric else style | {"linestyle": "none"}),
    )


def _ticks(axes: "Axes", axis: Axis) -> None:
    labels = [shortened(word, 16) for word in axis.places]
    axes.set_xticks(list(axis.places.values()), labels)
    axes.set_xlabel(f"{UNITS.get(axis.name, axis.name)}{axis.scale}")
    if sum(len(label) + 2 for label in labels) > LETTERS:
        axes.tick_params(axis="x", labelrotation=90)
    if not axis.is_numeric:
        axes.margins(x=0.15)
