"""What a figure of a sweep draws: a measure against an axis, a line for each combination of the other axes' values."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations as choices

from cos598d.tools.report.sweep_entries import LINKS, SETUP, SeedGroup, axes_of, number_behind, varying
from cos598d.tools.report.sweep_measures import Measure, Spread

MOST_LINES, MOST_PANELS = 7, 6
# Neighbours on an axis that are nearer than this share of it would hide each other.
LEAST_GAP = 0.08
_Group = tuple[Mapping[str, str], dict[str, Spread]]
LINEAR, LOGARITHMIC, EVEN, WORDS = "", ", logarithmic", ", not to scale", ""


@dataclass(frozen=True)
class Line:
    """A measure's spread at each value of the axis, in the axis' order, with all other values the same."""

    settings: Mapping[str, str]  # the other axes' values, of those that vary
    points: Mapping[str, Spread]

    def words(self, axes: Iterable[str]) -> str:
        """Its values of these axes: "batch 4, setup 2x2"."""
        return ", ".join(f"{axis} {self.settings[axis]}" for axis in axes if axis in self.settings)

    @property
    def ends(self) -> tuple[Spread, Spread]:
        """At its first and at its last value."""
        spreads = list(self.points.values())
        return spreads[0], spreads[-1]


@dataclass(frozen=True)
class Axis:
    """An axis of a figure: its values, where each stands, and in what way."""

    name: str
    places: Mapping[str, float]
    scale: str
    is_numeric: bool


@dataclass(frozen=True)
class Chart:
    """A measure against an axis: panels of lines. `panel_axes` tell the panels apart, `line_axes` a panel's lines."""

    measure: Measure
    axis: Axis
    panel_axes: Sequence[str]
    line_axes: Sequence[str]
    lines: Sequence[Line]

    @property
    def panels(self) -> dict[str, list[Line]]:
        """The lines of each panel, by its title, without those for which there is no room."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.words(self.panel_axes), []).append(line)
        return {title: found[title][:MOST_LINES] for title in list(found)[:MOST_PANELS]}

    @property
    def is_whole(self) -> bool:
        """Whether there is room for every line."""
        return sum(map(len, self.panels.values())) == len(self.lines)


def chart_of(combinations: Sequence[SeedGroup], axis: str, measure: Measure) -> Chart | None:
    """The measure against the axis; None where no line of it has two points."""
    axes = axes_of(combinations)
    others = [name for name in varying(axes) if name != axis]
    groups: dict[tuple, _Group] = {}
    for one in combinations:
        spread = measure.spread(one)
        if axis in one.settings and spread:
            settings = {name: one.settings[name] for name in others if name in one.settings}
            groups.setdefault(tuple(settings.items()), (settings, {}))[1][one.settings[axis]] = spread
    found = list(groups.values())
    lines = [
        Line(settings, {word: points[word] for word in axes[axis] if word in points})
        for settings, points in (_with_one_host(found) if axis == SETUP else found)
    ]
    if all(len(line.points) < 2 for line in lines):
        return None
    used = [word for word in axes[axis] if any(word in line.points for line in lines)]
    others = [name for name in others if len({line.settings.get(name) for line in lines}) > 1]
    panel_axes = _panel_axes(lines, others)
    return Chart(
        measure,
        _axis(axis, used),
        panel_axes,
        [name for name in others if name not in panel_axes],
        sorted(lines, key=_in_order(others, axes)),
    )


def _with_one_host(groups: Sequence[_Group]) -> list[_Group]:
    """What has no links stands in the line of every link, with those of its other settings."""
    found, gone = [], []
    for settings, points in groups:
        rest = {axis: word for axis, word in settings.items() if axis not in LINKS}
        alone = next((group for group in groups if group[0] == rest), (rest, {}))
        if rest != settings:
            found.append((settings, alone[1] | points))
            gone.append(rest)
    return [group for group in groups if group[0] not in gone and all(group[0] != one for one, _ in found)] + found


def _in_order(others: Sequence[str], axes: Mapping[str, Sequence[str]]) -> Callable[[Line], list[int]]:
    """By the axes' values, each axis' in its own order; what has no value comes first."""

    def key(line: Line) -> list[int]:
        return [axes[name].index(line.settings[name]) if name in line.settings else -1 for name in others]

    return key


def _panel_axes(lines: Sequence[Line], others: Sequence[str]) -> Sequence[str]:
    """The axes that cut the lines into the fewest panels that can be read; of none, where one panel can."""
    found: list[tuple[tuple[bool, int], tuple[str, ...]]] = []
    for count in range(max(1, len(others))):
        for names in choices(others, count):
            panels: dict[str, int] = {}
            for line in lines:
                panels[line.words(names)] = panels.get(line.words(names), 0) + 1
            found.append(((max(panels.values()) > MOST_LINES, len(panels)), names))
    return min(found)[1]


def _axis(name: str, words: Sequence[str]) -> Axis:
    """Numbers to scale, by their logarithms where they are far apart, and side by side where neither can be read."""
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
