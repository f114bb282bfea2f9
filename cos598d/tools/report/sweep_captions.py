"""What the figures of a sweep show, in sentences made of their numbers."""

from collections import Counter
from collections.abc import Sequence

from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.sweep_entries import SeedGroup
from cos598d.tools.report.sweep_lines import Chart, Line
from cos598d.tools.report.sweep_measures import Measure, Spread

# So many lines get a sentence each; of more it is told what they do together.
FEW_LINES = 3
CHANCE = "One seed each: small differences may be chance."


def chart_caption(chart: Chart) -> list[str]:
    """What the measure does along the axis, whether the seeds support that, and what a point is."""
    lines = [line for line in chart.lines if len(line.points) > 1]
    spreads = [spread for line in chart.lines for spread in line.points.values()]
    if len({spread.mean for spread in spreads}) == 1:
        found = [f"It is {chart.measure.words(spreads[0].mean)} everywhere."]
    elif chart.axis.is_numeric:
        found = _courses(chart, lines) if len(lines) <= FEW_LINES else [_together(chart, lines)]
    else:
        found = [f"{_of(chart, line)}{_extremes(chart, line)}." for line in lines[:FEW_LINES]]
        found = found if len(lines) <= FEW_LINES else [_best(chart, lines)]
    if not chart.is_whole:
        shown = sum(map(len, chart.panels.values()))
        found.append(f"There is room for {shown} of {len(chart.lines)} lines here; the table has all.")
    return [*found, seeds_words(spreads)]


def overview_caption(combinations: Sequence[SeedGroup], across: Measure, up: Measure) -> list[str]:
    """Where in the figure to look."""
    spreads = [spread for one in combinations if (spread := up.spread(one)) and across.spread(one)]
    side = "top" if up.is_better_high else "bottom"
    return [
        f"A point is a combination. The further to the {side} left, the better in less time. {seeds_words(spreads)}"
    ]


def seeds_words(spreads: Sequence[Spread]) -> str:
    """What points and bars are."""
    counts = sorted({spread.seeds for spread in spreads})
    if counts[-1] == 1:
        return CHANCE
    count = str(counts[-1]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Points and bars: the mean, the least and the most of {count} seeds."


def _of(chart: Chart, line: Line) -> str:
    words = line.words([*chart.panel_axes, *chart.line_axes])
    return f"{words}: " if words else ""


def _courses(chart: Chart, lines: Sequence[Line]) -> list[str]:
    """Of each line, from its first value to its last."""
    found = []
    for line in lines:
        (first, last), (begin, *_, end) = line.ends, line.points
        before, after = (chart.measure.words(spread.mean) for spread in (first, last))
        words = f"{before} with {chart.axis.name} {begin}, {after} with {end}"
        found.append(f"{_of(chart, line)}{words}{_apart(first, last)}.")
    return found


def _together(chart: Chart, lines: Sequence[Line]) -> str:
    """Of many lines: in how many the measure rises and falls, by how much, and how many the seeds do not tell apart."""
    changes = [line.ends[1].mean - line.ends[0].mean for line in lines]
    rises, falls = [change for change in changes if change > 0], [-change for change in changes if change < 0]
    words = [
        f"{verb} in {len(found)}, by up to {chart.measure.words(max(found))}"
        for verb, found in (("rises", rises), ("falls", falls))
        if found
    ]
    words = words or ["is the same at both ends"]
    ends = {(list(line.points)[0], list(line.points)[-1]) for line in lines}
    begin, end = ends.pop() if len(ends) == 1 else ("its first value", "its last")
    near = sum(first.overlaps(last) for first, last in (line.ends for line in lines) if first.seeds > 1)
    said = f"; in {near} of them the ranges of the seeds at both ends overlap" if near else ""
    return f"From {chart.axis.name} {begin} to {end}, of {len(lines)} lines it {', and '.join(words)}{said}."


def _extremes(chart: Chart, line: Line) -> str:
    """Of a line over words: with which it is highest and lowest."""
    ranked = sorted(line.points, key=lambda word: line.points[word].mean)
    low, high = ranked[0], ranked[-1]
    least, most = line.points[low], line.points[high]
    if least.mean == most.mean:
        return f"{chart.measure.words(least.mean)} with every {chart.axis.name}"
    return (
        f"highest with {chart.axis.name} {high}, {chart.measure.words(most.mean)}, and lowest with {low}, "
        f"{chart.measure.words(least.mean)}{_apart(least, most)}"
    )


def _best(chart: Chart, lines: Sequence[Line]) -> str:
    """Of many lines over words: how often each word is the best of its line."""
    choose = max if chart.measure.is_better_high else min
    means = [{word: spread.mean for word, spread in line.points.items()} for line in lines]
    best = Counter(word for line in means for word in line if line[word] == choose(line.values()))
    places = [f"with {chart.axis.name} {word} in {count}" for word, count in best.most_common()]
    how = "highest" if chart.measure.is_better_high else "lowest"
    return f"Of {number_of(len(lines), 'line')} with all other values alike it is {how} {listed(places)}."


def _apart(one: Spread, other: Spread) -> str:
    if min(one.seeds, other.seeds) > 1 and one.overlaps(other) and one.mean != other.mean:
        return "; the seeds' ranges overlap, so they do not tell the two apart"
    return ""
