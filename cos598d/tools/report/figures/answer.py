"""The page's first picture: a few bars, what they are made of, how sure they are, and what travelled."""

from collections.abc import Sequence
from typing import NamedTuple

from cos598d.records.conventions import DDP, PHASES
from cos598d.terminal.words import listed
from cos598d.tools.report.figures.ladder import LOOKS as SPLIT_LOOKS
from cos598d.tools.report.figures.time import LOOK as PHASE_LOOKS
from cos598d.tools.report.figures.time import patch
from cos598d.tools.report.svg import draw, lanes, legend_below, shortened

MOST_LANES, FEW_LANES = 5, 3  # of a panel alone, and of one among others
WITHOUT, EXPOSED, WHOLE = SPLIT_LOOKS
ALL_LOOKS = PHASE_LOOKS | {word: (colour, "") for word, colour in SPLIT_LOOKS.items()}


class LabelledBar(NamedTuple):
    """A bar: its parts from left to right by their names in the legend, in seconds; its end's spread; words beside."""

    name: str
    parts: Sequence[tuple[str, float]]
    spread: tuple[float, float] | None
    words: str


class Panel(NamedTuple):
    """Bars on one scale."""

    title: str
    lanes: Sequence[LabelledBar]


def split_at_floor(seconds: float, floor: float | None) -> list[tuple[str, float]]:
    """The parts of a bar: what the floor takes, and what is exposed; whole where no floor was measured."""
    if floor is None:
        return [(WHOLE, seconds)]
    return [(WITHOUT, min(seconds, floor)), (EXPOSED, max(0.0, seconds - floor))]


def lanes_of(ranked: Sequence[str], most: int) -> list[str]:
    """Which names get one of `most` lanes where there are more: the fastest, DDP, and the slowest, in their order."""
    if len(ranked) <= most:
        return list(ranked)
    kept = {*ranked[: most - 2], DDP if DDP in ranked else ranked[most - 2], ranked[-1]}
    return [name for name in ranked if name in kept]


def answer_figure(panels: Sequence[Panel]) -> str | None:
    """The bars of each panel under one another; None without any."""
    if not panels:
        return None
    counts = [len(panel.lanes) for panel in panels]
    used = {word for panel in panels for lane in panel.lanes for word, length in lane.parts if length > 0}
    words = [word for word in (*PHASES, *SPLIT_LOOKS) if word in used]

    def paint(figure):
        axes_of = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 0.5 for count in counts])[:, 0]
        for axes, panel in zip(axes_of, panels, strict=True):
            for place, lane in enumerate(panel.lanes):
                left = 0.0
                for word, length in lane.parts:
                    colour, hatch = ALL_LOOKS[word]
                    axes.barh(place, length, 0.36, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
                    left += length
                if lane.spread:
                    axes.plot(lane.spread, [place, place], "-", color="black", marker="|", markersize=6, linewidth=1)
                axes.annotate(
                    *(lane.words, (1, place - 0.34)),
                    xycoords=("axes fraction", "data"),
                    va="center",
                    ha="right",
                    fontsize=9,
                )
            lanes(axes, [shortened(lane.name, 32) for lane in panel.lanes], -0.34)
            if panel.title:
                axes.set_title(shortened(panel.title), loc="left")
        axes_of[-1].set_xlabel("seconds an iteration")
        legend_below(figure, [patch(*ALL_LOOKS[word]) for word in words], words)

    label = f"seconds an iteration of {listed([lane.name for panel in panels for lane in panel.lanes])}"
    return draw("answer", label, 45 + sum(36 * count + 22 for count in counts), paint)
