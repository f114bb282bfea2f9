"""The page of a sweep: what its combinations come to, each figure against each axis, and the table of all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, LEFT_OUT
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.blocks import Block, Figure, Page, Section, headline_of
from cos598d.tools.report.numbers import plain
from cos598d.tools.report.page import build_page
from cos598d.tools.report.sweep_charts import CHANCE, chart_of, overview_figure
from cos598d.tools.report.sweep_entries import (
    ALONE,
    BATCH,
    DELAY,
    SECONDS,
    SETUP,
    SPEED_UP,
    Measure,
    Point,
    SweepEntry,
    axes_of,
    long_table,
    metric_measures,
    points_of,
    varying,
)
from cos598d.tools.report.sweep_table import cautions, left_out, tables_of

if TYPE_CHECKING:
    from pandas import DataFrame

# Of more runs the page says what they come to, and not what each of them did.
MOST_RUNS = 12
ON_ONE_MACHINE = (
    "Ranks on one machine, those of emulated hosts too, share its cores: this is not the speed-up of more machines."
)
GROWING = "The batch is per rank: with more ranks, a step has more examples and an epoch has fewer steps."
MOST_TIED = 4  # combinations of the same result that are named


def sweep_page(entries: Sequence[SweepEntry], title: str) -> Page:
    """Everything that the finished runs of a sweep have to show, and which runs are missing."""
    table, axes = long_table(entries), axes_of(entry.settings for entry in entries)
    metrics, seconds, used = metric_measures(table), Measure(SECONDS), varying(axes)

    def charts(names: Sequence[str], measure: Measure, prefix: str) -> list[Figure]:
        """A figure of the measure against each of the axes that change it; their names begin with `prefix`."""
        points = points_of(table, measure)
        found = [chart for axis in names if (chart := chart_of(points, axes, axis, measure))]
        return [chart.figure(f"{prefix}-{number}") for number, chart in enumerate(found)]

    # The delay has a section of its own for the seconds and for the metric that a task is known by.
    own = [axis for axis in used if axis != DELAY]
    by_setup = sorted(own, key=lambda axis: axis != SETUP)
    sections = [
        *(
            Section(f"{metric.title} against each axis", charts(used if number else own, metric, f"sweep{number}"))
            for number, metric in enumerate(metrics)
        ),
        Section("Seconds per epoch", charts(by_setup, seconds, "sweep-seconds")),
        Section(
            "Speed-up against setup 1x1", _speed_up(entries, charts(by_setup, Measure(SPEED_UP), "sweep-speed-up"))
        ),
        Section(
            "Delay",
            [
                chart
                for number, measure in enumerate([seconds, *metrics[:1]])
                for chart in charts([DELAY], measure, f"sweep-delay{number}")
            ],
        ),
        Section("All combinations", [*tables_of(entries), *left_out(entries)]),
    ]
    runs = [entry.run for entry in entries if entry.run]
    if 0 < len(runs) <= MOST_RUNS:
        sections += build_page(runs).sections
    overview = None
    if metrics:
        overview = overview_figure(points_of(table, metrics[0]), points_of(table, seconds), metrics[0], seconds)
    headline = headline_of(cautions(entries), sentences(entries), overview)
    return Page(title, _lead(entries, axes), headline, [section for section in sections if section.blocks])


def _speed_up(entries: Sequence[SweepEntry], charts: Sequence[Figure]) -> list[Block]:
    has_batch = len({entry.settings.get(BATCH) for entry in entries}) > 1
    is_shared = any(entry.run and entry.run.environment["ranks_on_host"] > 1 for entry in entries)
    notes = [*([GROWING] if has_batch else []), *([ON_ONE_MACHINE] if is_shared else [])]
    return [*charts, " ".join(notes)] if charts and notes else list(charts)


def _lead(entries: Sequence[SweepEntry], axes: Mapping[str, Sequence[str]]) -> str:
    """What was swept, and how many runs there are."""
    counts = Counter(entry.outcome for entry in entries)
    ends = {FINISHED: "finished", FAILED: "failed", BROKEN_OFF: "not finished", LEFT_OUT: "left out"}
    ended = [f"{counts[outcome]} {words}" for outcome, words in ends.items() if counts[outcome]]
    done = ", all finished" if counts[FINISHED] == len(entries) else f", of which {listed(ended)}"
    words = listed([f"{axis} ({', '.join(words)})" for axis, words in axes.items()])
    seeds = number_of(len({entry.seed for entry in entries}), "seed")
    return f"A sweep of {words} with {seeds}: {number_of(len(entries), 'run')}{done}."


def sentences(entries: Sequence[SweepEntry]) -> list[str]:
    """The best, the fastest, the speed-up, and what the delay does, as far as the records show it."""
    if not any(entry.run for entry in entries):
        return ["No run has finished, so there is nothing to compare."]
    table, axes = long_table(entries), axes_of(entry.settings for entry in entries)
    metrics, seconds = metric_measures(table), points_of(table, Measure(SECONDS))
    found = [_ends(table, measure, varying(axes)) for measure in [*metrics[:1], Measure(SECONDS)]]
    if not seconds:
        found[-1] = "The fastest combination is unknown: the machine was busy during all runs."
    ratios: dict[str, list[float]] = {}
    for point in points_of(table, Measure(SPEED_UP)):
        ratios.setdefault(point.settings[SETUP], []).append(point.mean)
    if ratios:
        places = [f"{_from_to(those)} times as fast with {setup}" for setup, those in ratios.items()]
        found.append(f"Against {SETUP} {ALONE} with the same other settings, an epoch is {listed(places)}.")
    if DELAY in axes and (chart := chart_of(seconds, axes, DELAY, Measure(SECONDS))):
        lines = [list(line.points.values()) for line in chart.lines if len(line.points) > 1]
        ends = [axes[DELAY][0], axes[DELAY][-1]]
        whole = [line for line in lines if [line[0].settings[DELAY], line[-1].settings[DELAY]] == ends]
        changes = _from_to([line[-1].mean / line[0].mean for line in whole]) if whole else ""
        found += [f"From {DELAY} {ends[0]} to {ends[1]}, an epoch takes {changes} times as long."] if whole else []
    combinations = {tuple(entry.settings.items()) for entry in entries}
    if sum(bool(entry.run) for entry in entries) <= len(combinations) and len(combinations) > 1:
        found.append(CHANCE)
    return found


def _ends(table: "DataFrame", measure: Measure, axes: Sequence[str]) -> str:
    """The best combination and the worst, and how many of the others the seeds do not tell from the best."""
    points = sorted(points_of(table, measure), key=lambda one: one.mean, reverse=measure.is_better_high)
    if not points:
        return ""
    best, worst = points[0], points[-1]
    what = f"{measure.title} after the last epoch" if measure.title != SECONDS else "An epoch's training, in seconds,"
    if best.mean == worst.mean:
        where = f" with {best.words(axes)}" if axes and len(points) == 1 else ""
        return f"{what} is {_range(measure, best)}{where or (' everywhere' if len(points) > 1 else '')}."
    high, low = ("highest", "lowest") if measure.is_better_high else ("lowest", "highest")
    words = f"{what} is {high} with {_tied(points, best, axes)}, {_range(measure, best)}, and {low} with "
    words += f"{_tied(points, worst, axes)}, {_range(measure, worst)}"
    near = sum(point.overlaps(best) for point in points[1:]) if max(point.seeds for point in points) > 1 else 0
    if near == len(points) - 1:
        words += "; the ranges overlap, so these seeds show none to be the best"
    elif near:
        words += f"; of {number_of(near, 'other combination')} the range overlaps the best one's"
    return f"{words}."


def _tied(points: Sequence[Point], end: Point, axes: Sequence[str]) -> str:
    """The combinations that come to the same."""
    same = [point for point in points if (point.mean, point.least, point.most) == (end.mean, end.least, end.most)]
    names = [point.words(axes) for point in same]
    return names[0] if len(names) == 1 else f"{len(names)} combinations alike ({', '.join(names[:MOST_TIED])})"


def _range(measure: Measure, point: Point) -> str:
    mean, least, most = (measure.shown(value).removesuffix(" s") for value in (point.mean, point.least, point.most))
    if point.seeds == 1:
        return mean
    if point.least == point.most:
        return f"{mean} (with each of {point.seeds} seeds)"
    return f"{mean} ({least} to {most} over {point.seeds} seeds)"


def _from_to(ratios: Sequence[float]) -> str:
    low, high = plain(min(ratios)), plain(max(ratios))
    return low if low == high else f"{low} to {high}"
