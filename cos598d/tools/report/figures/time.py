"""Figures of where the time goes: seconds an iteration, its phases, and the timeline of one iteration."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cos598d.records.conventions import PHASES
from cos598d.terminal.colours import BLUE, DARK_GREY, GREEN, GREY, PURPLE, SERIES, SKY, VERMILLION, YELLOW
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import seconds
from cos598d.tools.report.speed import phases_of
from cos598d.tools.report.svg import MARKERS, draw, lanes, legend_below, shortened
from cos598d.tools.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.patches import Patch

# A phase has one look on the whole page. Hatches, for whoever does not see the colours.
LOOK = {
    "data": (GREY, ""),
    "forward": (SKY, ""),
    "backward": (BLUE, ""),
    "sync": (VERMILLION, "///"),
    "clip": (YELLOW, ""),
    "step": (GREEN, "\\\\\\"),
    "checkpoint": (PURPLE, "..."),
    "between": ("#ffffff", ""),
}
BESIDE, AFTER = ("#F3C6A5", ""), (VERMILLION, "///")
MOST_DOTS = 200


def seconds_figure(runs: Sequence[Run]) -> str | None:
    """Each iteration's seconds as a dot, the mean and its 95 % interval; None where no run counted an iteration."""
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
            mean, interval = statistics.fmean(found), run.seconds["interval_95"]
            if interval:
                axes.plot(interval, [place, place], "-", color="black", marker="|", markersize=7)
            axes.plot([mean], [place], MARKERS[place % len(MARKERS)], color=colour, markersize=6)
        lanes(axes, [run.name for run in runs], -0.42)
        axes.set_xlabel("seconds an iteration")
        handles = [
            Line2D([], [], color="black", marker="|", markersize=7),
            Line2D([], [], color=BLUE, marker="o", linestyle=""),
            Line2D([], [], color=BLUE, marker=".", markersize=3, linestyle=""),
        ]
        legend_below(figure, handles, ["mean's 95 %", "mean", "an iteration"])

    return draw("seconds", f"seconds an iteration of {listed([run.name for run in runs])}", 50 + 42 * len(runs), paint)


def phases_figure(runs: Sequence[Run]) -> str | None:
    """A bar for each run, its phases end to end; None where no run has any."""
    runs = [run for run in runs if run.seconds["mean"] and run.summary["phases"]["seconds_forward"] is not None]
    if not runs:
        return None

    def paint(figure):
        axes = figure.subplots()
        for place, run in enumerate(runs):
            left = 0.0
            for phase in PHASES:
                length = run.summary["phases"][f"seconds_{phase}"] or 0.0
                _block(axes, phase, left, length, place, 0.36)
                left += length
        lanes(axes, [run.name for run in runs], -0.34)
        axes.set_xlabel("seconds an iteration, mean over the ranks")
        shown = phases_of([run.summary for run in runs])
        legend_below(figure, [patch(*LOOK[phase]) for phase in shown], list(shown))

    return draw("phases", f"seconds by phase of {listed([run.name for run in runs])}", 45 + 36 * len(runs), paint)


def timeline_figure(timeline: Timeline, name: str, until: float) -> str:
    """One iteration of rank 0 from left to right: its phases in the first lane, each gradient call below."""
    calls = timeline.calls
    # Some calls get a lane with a name; hundreds, a staircase of the same height.
    is_few = len(calls) <= 12
    lane = 1.0 if is_few else 12 / len(calls)

    def paint(figure):
        axes = figure.subplots()
        for phase, start, length in timeline.spans:
            _block(axes, phase, start, length, 0, 0.8)
        labels: dict[float, str] = {0: "phases"}
        for number, (tensor, start, end) in enumerate(calls):
            y = 1 + (number + 0.5) * lane - 0.5
            split = min(max(start, timeline.backward_end), end)
            if is_few:
                _block(axes, BESIDE, start, split - start, y, 0.8)
                _block(axes, AFTER, split, end - split, y, 0.8)
            else:  # a stair has no room for edges and hatches
                axes.barh([y, y], [split - start, end - split], lane, [start, split], color=[BESIDE[0], AFTER[0]])
            if is_few or number in (0, len(calls) - 1):
                labels[y] = shortened(tensor, 12)
        if timeline.untimed and not calls:
            axes.broken_barh([(0, timeline.seconds)], (0.6, 0.8), facecolor="none", edgecolor=DARK_GREY, linestyle=":")
            axes.text(
                0,
                1,
                f" {number_of(timeline.untimed, 'call')}, times not told",
                ha="left",
                va="center",
            )
        axes.set_yticks(list(labels), list(labels.values()))
        axes.set_ylim(0.6 + (max(1, len(calls) * lane) if calls or timeline.untimed else 0), -0.6)
        axes.set_xlim(0, until)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds since the iteration began")
        used = [phase for phase in PHASES if any(span[0] == phase and span[2] > 0 for span in timeline.spans)]
        looks, words = [LOOK[phase] for phase in used], list(used)
        if any(start < timeline.backward_end for _, start, _ in calls):
            looks, words = [*looks, BESIDE], [*words, "call beside"]
        if any(end > timeline.backward_end for *_, end in calls):
            looks, words = [*looks, AFTER], [*words, "call after"]
        legend_below(figure, [patch(*look) for look in looks], words)

    label = f"one iteration of {seconds(timeline.seconds)} of {timeline.run}: its phases and gradient calls"
    return draw(name, label, 65 + 20 * min(max(1, len(calls)), 12), paint)


def _block(axes, look: str | tuple[str, str], left: float, length: float, y: float, height: float) -> None:
    colour, hatch = LOOK[look] if isinstance(look, str) else look
    if length > 0:
        axes.barh(y, length, height, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)


def patch(colour: str, hatch: str) -> "Patch":
    """What a legend shows of a look."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, hatch=hatch, edgecolor="white")
