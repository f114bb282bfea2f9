"""Figures of a sweep: a measure by an axis, with a line for each combination of the other axes' values; and all
combinations by their seconds and results."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations as choices
from typing import TYPE_CHECKING

from cos598d.terminal.colours import BLACK, DARK_GREY, SERIES
from cos598d.tools.report.blocks import Figure
from cos598d.tools.report.svg import MARKERS, draw, legend_below, line_style, shortened
from cos598d.tools.report.sweep_entries import (
    BATCH,
    LINKS,
    SETUP,
    SPEED_UP,
    Measure,
    Point,
    axes_of,
    number_behind,
    varying,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES, MOST_PANELS = 7, 6
# Neighbours on an axis that are nearer than this share of it would hide each other.
LEAST_GAP = 0.08
LINEAR, LOGARITHMIC, EVEN, WORDS = "", ", logarithmic", ", not to scale", ""
# The units of an axis.
UNITS = {BATCH: "batch (examples on each rank)", SETUP: "setup (hosts x ranks on each)"}
LEVEL = 1.0  # no speed-up
# Letters that fit in a row under a plot, with spaces between the words.
LETTERS = 42
CHANCE = "One seed each: small differences may be chance."


@dataclass(frozen=True)
class Line:
    """A measure's point at each value of the axis, in the axis' order, with all other values the same."""

    settings: Mapping[str, str]  # the other varying axes' values
    points: Mapping[str, Point]

    def words(self, axes: Iterable[str]) -> str:
        """Its values of these axes: "batch 4, setup 2x2"."""
        return ", ".join(f"{axis} {self.settings[axis]}" for axis in axes if axis in self.settings)


@dataclass(frozen=True)
class Axis:
    """An axis of a figure: its values, their positions, and its scale."""

    name: str
    places: Mapping[str, float]
    scale: str
    is_numeric: bool


@dataclass(frozen=True)
class Chart:
    """A measure by an axis: panels of lines. `panel_axes` distinguish the panels, `line_axes` a panel's lines."""

    measure: Measure
    axis: Axis
    panel_axes: Sequence[str]
    line_axes: Sequence[str]
    lines: Sequence[Line]

    @property
    def panels(self) -> dict[str, list[Line]]:
        """The lines of each panel, by its title, without those that do not fit."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.words(self.panel_axes), []).append(line)
        return {title: found[title][:MOST_LINES] for title in list(found)[:MOST_PANELS]}

    def figure(self, name: str) -> Figure:
        """The means by the axis, each with a bar from the smallest to the largest of its seeds."""
        points = [point for line in self.lines for point in line.points.values()]
        shown = sum(map(len, self.panels.values()))
        caption = [seeds_words(points)]
        if shown < len(self.lines):
            caption.insert(0, f"There is room for {shown} of {len(self.lines)} lines here; the table has all.")
        return Figure(name, _paint_chart(self, name), caption)


def chart_of(points: Sequence[Point], axes: Mapping[str, Sequence[str]], axis: str, measure: Measure) -> Chart | None:
    """The measure's points by one of the axes; None if no line has two points."""
    others = [name for name in varying(axes) if name != axis]
    found: dict[tuple, Line] = {}
    for point in _beside_every_link(points) if axis == SETUP else points:
        if axis in point.settings:
            settings = {name: point.settings[name] for name in others if name in point.settings}
            line = found.setdefault(tuple(settings.items()), Line(settings, {}))
            found[tuple(settings.items())] = replace(line, points={**line.points, point.settings[axis]: point})
    # By the axes' values, each axis in its own order; missing values first.
    order = {name: {word: place for place, word in enumerate(axes[name])} for name in others}
    lines = sorted(
        found.values(), key=lambda line: [order[name].get(line.settings.get(name, ""), -1) for name in others]
    )
    lines = [
        replace(one, points={word: one.points[word] for word in axes[axis] if word in one.points}) for one in lines
    ]
    if all(len(line.points) < 2 for line in lines):
        return None
    used = [word for word in axes[axis] if any(word in line.points for line in lines)]
    others = [name for name in others if len({line.settings.get(name) for line in lines}) > 1]
    panel_axes = _panel_axes(lines, others)
    line_axes = [name for name in others if name not in panel_axes]
    return Chart(measure, _axis(axis, used), panel_axes, line_axes, lines)


def overview_figure(points: Sequence[Point], seconds: Sequence[Point], up: Measure, across: Measure) -> Figure | None:
    """Each combination at its seconds and its metric: the colour shows the first axis' value, the marker the second's.

    None if fewer than two combinations have both.
    """
    by_settings = {tuple(point.settings.items()): point for point in seconds}
    pairs = [(x, y) for y in points if (x := by_settings.get(tuple(y.settings.items())))]
    if len(pairs) < 2:
        return None
    axes_words = axes_of(x.settings for x, _ in pairs)
    shown = varying(axes_words)[:2]

    def look(one: Point, place: int) -> int:
        word = one.settings.get(shown[place]) if len(shown) > place else None
        return axes_words[shown[place]].index(word) if word is not None else 0

    def paint(figure):
        axes = figure.subplots()
        for x, y in pairs:
            axes.errorbar(
                *(x.mean, y.mean),
                yerr=[[y.mean - y.least], [y.most - y.mean]],
                xerr=[[x.mean - x.least], [x.most - x.mean]],
                fmt=MARKERS[look(x, len(shown) - 1) % len(MARKERS)],
                color=SERIES[look(x, 0) % len(SERIES)],
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

    side = "top" if up.is_better_high else "bottom"
    words = f"A point is a combination. The further to the {side} left, the better in less time. "
    svg = draw("answer", f"{up.title} against {across.title}", 210, paint)
    return Figure("answer", svg, [words + seeds_words([y for _, y in pairs])])


def seeds_words(points: Sequence[Point]) -> str:
    """The meaning of points and bars."""
    counts = sorted({point.seeds for point in points})
    if counts[-1] == 1:
        return CHANCE
    count = str(counts[-1]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    words = f"Points and bars: the mean, the least and the most of {count} seeds."
    return f"{words} Bars that overlap may not differ."


def _beside_every_link(points: Sequence[Point]) -> list[Point]:
    """A point without links is part of every link's line with its other settings."""

    def rest(point: Point) -> dict[str, str]:
        return {axis: word for axis, word in point.settings.items() if axis not in (SETUP, *LINKS)}

    found = []
    for point in points:
        own = {axis: word for axis, word in point.settings.items() if axis in LINKS}
        links = [
            tuple((axis, word) for axis, word in other.settings.items() if axis in LINKS)
            for other in points
            if not own and rest(other) == rest(point)
        ]
        every = [dict(link) for link in dict.fromkeys(links) if link] or [own]
        found += [replace(point, settings={**point.settings, **link}) for link in every]
    return found


def _panel_axes(lines: Sequence[Line], others: Sequence[str]) -> Sequence[str]:
    """The axes that split the lines into the fewest legible panels; none if one panel is legible."""
    found: list[tuple[tuple[bool, int], tuple[str, ...]]] = []
    for count in range(max(1, len(others))):
        for names in choices(others, count):
            panels: dict[str, int] = {}
            for line in lines:
                panels[line.words(names)] = panels.get(line.words(names), 0) + 1
            found.append(((max(panels.values()) > MOST_LINES, len(panels)), names))
    return min(found)[1]


def _axis(name: str, words: Sequence[str]) -> Axis:
    """Numbers to scale, logarithmic if they are far apart, or evenly spaced if neither is legible."""
    numbers = [number_behind(word) for word in words]
    values = [value for value in numbers if value is not None]
    even = [float(place) for place in range(len(words))]
    if len(values) < len(words):
        return Axis(name, dict(zip(words, even)), WORDS, is_numeric=False)
    scales = [(values, LINEAR)]
    if len(values) > 2 and values[0] > 0 and values[-1] / values[0] >= 8:
        scales.insert(0, ([math.log2(value) for value in values], LOGARITHMIC))
    for places, scale in scales:
        gaps = [after - before for before, after in zip(places, places[1:])]
        if min(gaps) >= LEAST_GAP * sum(gaps):
            return Axis(name, dict(zip(words, places)), scale, is_numeric=True)
    return Axis(name, dict(zip(words, even)), EVEN, is_numeric=True)


def _paint_chart(chart: Chart, name: str) -> str:
    panels, axis, measure = chart.panels, chart.axis, chart.measure
    names = dict.fromkeys(line.words(chart.line_axes) for line in chart.lines)
    styles = {words: place for place, words in enumerate(names)}

    def paint(figure):
        axes_of_panels = figure.subplots(len(panels), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        handles = {}
        for axes, (title, lines) in zip(axes_of_panels, panels.items(), strict=True):
            for place, line in enumerate(lines):
                words = line.words(chart.line_axes)
                aside = _aside(axis, place, len(lines))
                handles[words] = _paint_line(axes, axis, line, line_style(styles[words]), aside)
            axes.set_title(shortened(", ".join(filter(None, (measure.title, title))), 46), loc="left")
            if measure.title == SPEED_UP:
                axes.axhline(LEVEL, color=DARK_GREY, linestyle=":")
        # Only now: the panels share their scale, and a limit would exclude later ones.
        if measure.begins_at_zero:
            axes_of_panels[0].set_ylim(0, 1.05 * axes_of_panels[0].get_ylim()[1])
        _ticks(axes_of_panels[-1], axis)
        if len(handles) > 1 or any(handles):
            legend_below(figure, list(handles.values()), list(handles))

    return draw(name, f"{measure.title} against {axis.name}", 50 + 150 * len(panels), paint)


def _aside(axis: Axis, place: int, count: int) -> float:
    """The offset of a line's points from their value, in units of the spacing, so that none hides another's."""
    is_even = not axis.is_numeric or axis.scale == EVEN
    return min(0.08, 0.5 / count) * (place - (count - 1) / 2) if is_even else 0.0


def _paint_line(axes: "Axes", axis: Axis, line: Line, style: dict, aside: float):
    points = list(line.points.values())
    return axes.errorbar(
        [axis.places[word] + aside for word in line.points],
        [point.mean for point in points],
        yerr=[[one.mean - one.least for one in points], [one.most - one.mean for one in points]],
        capsize=2,
        elinewidth=0.8,
        # Between words a connecting line has no meaning.
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
