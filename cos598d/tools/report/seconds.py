"""The page's part on seconds: those of an iteration with their spread, its phases, and how busy the hosts were."""

import statistics
from collections.abc import Sequence

from cos598d.records.conventions import DDP, PHASES
from cos598d.terminal.colours import BLUE, SERIES
from cos598d.terminal.tables import with_columns
from cos598d.terminal.words import listed
from cos598d.tools.report.blocks import Block, Table, figures
from cos598d.tools.report.disturbed import busy_and_own
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import is_number, plain
from cos598d.tools.report.references import in_groups
from cos598d.tools.report.svg import MARKERS, PHASE_LOOKS, bars, draw, lanes, legend_below, patch
from cos598d.tools.report.table import (
    AGAINST,
    SLOW_ONES,
    SPEED_NOTE,
    SPREAD,
    phases_of,
    speed_rows,
    time_cells,
    warm_up_words,
)

MOST_DOTS = 200
# Libraries that make their calls, and wait for them, in other phases than `sync`.
CALLS_INSIDE = {DDP: "backward", "torch_fsdp": "forward and backward"}


def seconds_blocks(runs: Sequence[Run]) -> list[Block]:
    """Each run's seconds per iteration and their spread, examples per second, and the statistics of repeats."""
    runs = [run for run in runs if run.summary["losses"]]
    if not runs:
        return []
    summaries = [run.summary for run in runs]
    note = (
        f"Rank 0, without {warm_up_words(summaries)}; the first is in its own column. "
        "95 %: the confidence interval of this run's mean, from its own iterations. A repeat may be outside it. "
        "Exposed: the median less that of sync none."
    )
    if any(len(set(run.series.examples)) > 1 for run in runs):
        note += " Iterations with fewer examples, as at an epoch's end, count too."
    blocks: list[Block] = [
        Table(note, with_columns(time_cells(summaries), ["run", *SPREAD, *SLOW_ONES, *AGAINST])),
        *([Table(SPEED_NOTE, speeds)] if (speeds := speed_rows(summaries)) else []),
    ]
    groups = in_groups(summaries)
    repeated = [cells for cells, group in zip(time_cells(groups), groups, strict=True) if "repeats" in group]
    if repeated:
        note = "Runs of the same settings together. 95 %: from run to run (Student's t), of the mean of their means; "
        note += "of ratios and exposed seconds as they are within each repeat. Median: the mean of their medians."
        blocks.append(Table(note, with_columns(repeated, ["run", *SPREAD, *AGAINST])))
    caption = ["A dot is an iteration. Means that differ by less than their spread may not differ."]
    return [*blocks, *figures(("seconds", _seconds_figure(runs), caption))]


PHASES_NOTE = (
    "Seconds of each phase: the mean over iterations and ranks. Sync includes the wait for all ranks' loss. Seconds "
    "between two phases are in none."
)


def phases_blocks(runs: Sequence[Run]) -> list[Block]:
    """Where an iteration's time goes, and how busy the processors were meanwhile."""
    counted = [run for run in runs if run.seconds["mean"]]
    if not counted:
        return []
    summaries = [run.summary for run in counted]
    rows = with_columns(time_cells(summaries), ["run", *phases_of(summaries)])
    blocks: list[Block] = [Table(PHASES_NOTE, rows)]
    blocks += figures(("phases", _phases_figure(counted), _inside(counted)))
    has_gpu = any("gpu_utilization_percent" in row for run in runs for rows in run.host for row in rows)
    head = ["run", "processor seconds per iteration", "host's processors busy", *(["GPU busy"] if has_gpu else [])]
    hosts = [_host_row(run, has_gpu) for run in runs if any(run.host)]
    note = "Processor seconds: of all that a process did, evaluation too, divided "
    note += "by its iterations; the mean over the ranks. Busy: the mean over ranks and time"
    note += "; of GPUs over their samples." if has_gpu else "."
    return [*blocks, Table(note, [head, *hosts])] if hosts else blocks


def _host_row(run: Run, has_gpu: bool) -> list[str]:
    ranks = [rows for rows in run.host if rows]
    steps = [(rows[-1]["iteration"] - rows[0]["iteration"], rows) for rows in ranks]
    spent = [(rows[-1]["process_cpu_seconds"] - rows[0]["process_cpu_seconds"]) / n for n, rows in steps if n > 0]
    shares = [100 * found[0] for rows in ranks if (found := busy_and_own(rows))]
    cells = [run.name, plain(statistics.fmean(spent)) if spent else "-"]
    cells.append(f"{statistics.fmean(shares):.0f} %" if shares else "-")
    if has_gpu:
        name = "gpu_utilization_percent"
        busy = [row[name] for rows in ranks for row in rows if is_number(row.get(name))]
        cells.append(f"{statistics.fmean(busy):.0f} %" if busy else "-")
    return cells


def _inside(runs: Sequence[Run]) -> list[str]:
    """A sentence on the runs whose gradients are sent in another phase than `sync`."""
    found: dict[str, list[str]] = {}
    for run in runs:
        phases = CALLS_INSIDE.get(run.summary["sync"])
        if phases and run.summary["world_size"] > 1:
            found.setdefault(phases, []).append(run.name)
    return [f"The calls of {listed(names)} run inside {phases}." for phases, names in found.items()]


def _seconds_figure(runs: Sequence[Run]) -> str | None:
    """Each iteration's seconds as a dot, the mean and its 95 % interval; None if no run has iterations."""
    runs = [run for run in runs if run.counted_seconds]
    if not runs:
        return None

    def paint(figure):
        from matplotlib.lines import Line2D

        axes = figure.subplots()
        for place, run in enumerate(runs):
            found, colour = run.counted_seconds, SERIES[place % len(SERIES)]
            dots = found[:: -(-len(found) // MOST_DOTS)]
            # Spread over the lane, in the order of the iterations.
            heights = [place + 0.12 + 0.26 * number / max(1, len(dots) - 1) for number in range(len(dots))]
            axes.plot(dots, heights, ".", color=colour, markersize=3, alpha=0.6)
            interval = run.seconds["interval_95"]
            if interval:
                axes.plot(interval, [place, place], "-", color="black", marker="|", markersize=7)
            axes.plot([statistics.fmean(found)], [place], MARKERS[place % len(MARKERS)], color=colour, markersize=6)
        lanes(axes, [run.name for run in runs], -0.42)
        axes.set_xlabel("seconds per iteration")
        handles = [
            Line2D([], [], color="black", marker="|", markersize=7),
            Line2D([], [], color=BLUE, marker="o", linestyle=""),
            Line2D([], [], color=BLUE, marker=".", markersize=3, linestyle=""),
        ]
        legend_below(figure, handles, ["mean's 95 %", "mean", "an iteration"])

    return draw("seconds", f"seconds per iteration of {listed([run.name for run in runs])}", 50 + 42 * len(runs), paint)


def _phases_figure(runs: Sequence[Run]) -> str | None:
    """A bar per run, its phases end to end; None if no run has any."""
    runs = [run for run in runs if run.summary["phases"]["seconds_forward"] is not None]
    if not runs:
        return None

    def paint(figure):
        axes = figure.subplots()
        for place, run in enumerate(runs):
            phases = run.summary["phases"]
            bars(axes, [(PHASE_LOOKS[phase], phases[f"seconds_{phase}"] or 0.0) for phase in PHASES], place)
        lanes(axes, [run.name for run in runs], -0.34)
        axes.set_xlabel("seconds per iteration, mean over the ranks")
        shown = phases_of([run.summary for run in runs])
        legend_below(figure, [patch(*PHASE_LOOKS[phase]) for phase in shown], list(shown))

    return draw("phases", f"seconds by phase of {listed([run.name for run in runs])}", 45 + 36 * len(runs), paint)
