"""The page of a sweep: what its combinations come to, each figure against each axis, and the table of all."""

from collections.abc import Sequence

from cos598d.tools.report import sweep_answer
from cos598d.tools.report.blocks import Block, Figure, Headline, Page, Section, Table
from cos598d.tools.report.figures.sweep import chart_figure, overview_figure
from cos598d.tools.report.page import build_page
from cos598d.tools.report.sweep_captions import chart_caption, overview_caption
from cos598d.tools.report.sweep_entries import (
    BATCH,
    DELAY,
    SETUP,
    SeedGroup,
    SweepEntry,
    axes_of,
    combinations_of,
    varying,
)
from cos598d.tools.report.sweep_lines import chart_of
from cos598d.tools.report.sweep_measures import Measure, metric_measures, seconds_measure, speed_up
from cos598d.tools.report.sweep_table import TABLE_NOTE, sweep_rows

# Of more runs the page says what they come to, and not what each of them did.
MOST_RUNS = 12
ON_ONE_MACHINE = (
    "Ranks on one machine, those of emulated hosts too, share its cores: this is not the speed-up of more machines."
)
GROWING = "A batch is the examples on each rank: more ranks make a step's batch larger, and an epoch's steps fewer."


def sweep_page(entries: Sequence[SweepEntry], title: str) -> Page:
    """Everything that the finished runs of a sweep have to show, and which runs are missing."""
    found = combinations_of(entries)
    axes, metrics, seconds = varying(axes_of(found)), metric_measures(found), seconds_measure()
    # The delay has a section of its own for the seconds and for the metric that a task is known by.
    own = [axis for axis in axes if axis != DELAY]
    by_setup = sorted(own, key=lambda axis: axis != SETUP)
    sections = [
        *(
            Section(
                f"{metric.title} against each axis", _charts(found, axes if number else own, metric, f"sweep{number}")
            )
            for number, metric in enumerate(metrics)
        ),
        Section("Seconds an epoch", _charts(found, by_setup, seconds, "sweep-seconds")),
        Section("Speed-up against setup 1x1", _speed_up(found, by_setup)),
        Section(
            "Delay",
            [
                chart
                for number, measure in enumerate([seconds, *metrics[:1]])
                for chart in _charts(found, [DELAY], measure, f"sweep-delay{number}")
            ],
        ),
        Section("All combinations", [Table(TABLE_NOTE, sweep_rows(entries)), *sweep_answer.left_out(entries)]),
    ]
    runs = [run for one in found for run in one.runs]
    if 0 < len(runs) <= MOST_RUNS:
        sections += build_page(runs).sections
    overview = overview_figure(found, seconds, metrics[0]) if metrics else None
    return Page(
        title,
        sweep_answer.lead(entries, found),
        Headline(
            sweep_answer.cautions(entries, found),
            sweep_answer.sentences(found),
            Figure("answer", overview, overview_caption(found, seconds, metrics[0])) if overview else None,
        ),
        [section for section in sections if section.blocks],
    )


def _charts(combinations: Sequence[SeedGroup], axes: Sequence[str], measure: Measure, prefix: str) -> list[Figure]:
    """A figure of the measure against each of the axes that change it; their names begin with `prefix`."""
    charts = [chart for axis in axes if (chart := chart_of(combinations, axis, measure))]
    names = [f"{prefix}-{number}" for number in range(len(charts))]
    return [Figure(name, chart_figure(chart, name), chart_caption(chart)) for name, chart in zip(names, charts)]


def _speed_up(combinations: Sequence[SeedGroup], axes: Sequence[str]) -> list[Block]:
    blocks = _charts(combinations, axes, speed_up(combinations), "sweep-speed-up")
    if not blocks:
        return []
    runs = [run for one in combinations for run in one.runs]
    has_shared = any(run.environment["ranks_on_host"] > 1 for run in runs)
    notes = [*([GROWING] if BATCH in axes else []), *([ON_ONE_MACHINE] if has_shared else [])]
    return [*blocks, " ".join(notes)] if notes else list(blocks)
