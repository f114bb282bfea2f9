"""The page's first picture: a few bars, what they are made of, how sure they are, and what travelled."""

from collections.abc import Sequence
from typing import NamedTuple

from cos598d.records.conventions import DDP, FLOOR, PHASES
from cos598d.terminal.words import listed
from cos598d.tools.report.benches import EXPOSED, SPLIT_LOOKS, WHOLE, WITHOUT_SYNC, Bench, CandidateSeconds
from cos598d.tools.report.blocks import Figure
from cos598d.tools.report.disturbed import DISTURBED
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import plain
from cos598d.tools.report.references import is_disturbed, is_floor
from cos598d.tools.report.svg import PHASE_LOOKS, bars, draw, lanes, legend_below, patch, shortened

MOST_PANELS = 3
NO_GRADIENTS = "sends no gradients"
MOST_LANES, FEW_LANES = 5, 3  # of a panel alone, and of one among others
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
    bars: Sequence[LabelledBar]


def ranked_runs(group: Sequence[Run]) -> list[Run]:
    """From the fastest to the slowest, disturbed ones last; a run without communication only if it is the only one."""
    found = [run for run in group if not is_floor(run.summary)] or list(group)
    return sorted(found, key=lambda run: (is_disturbed(run.summary), run.seconds["mean"]))


def answer_figure(group: Sequence[Run], benches: Sequence[Bench]) -> Figure | None:
    """The main group's runs, and the first benches' candidates, as bars; None where there is nothing to draw."""
    drawn = [bench for bench in benches if bench.candidates][: MOST_PANELS - bool(group)]
    most = MOST_LANES if len(drawn) + bool(group) == 1 else FEW_LANES
    panels = [_run_panel(group, most, is_split_at_floor=bool(drawn))] if group else []
    panels += [_bench_panel(bench, most) for bench in drawn]
    if not panels:
        return None
    has_ratios = [any(one.ratio is not None for one in bench.candidates) for bench in drawn]
    references = ["the fastest"] if group or not all(has_ratios) else []
    references += [f"{DDP}, as in the table"] if any(has_ratios) else []
    spreads = [word for word, is_there in (("the mean's 95 %", group), ("a bench's quartiles", drawn)) if is_there]
    caption = [
        f"Black line: {' and '.join(spreads)}. On the right: the time relative to {' or '.join(references)} (not if "
        "the machine was busy), and the MB that the busiest rank sends."
    ]
    shown = {lane.name for lane in panels[0].bars}
    if absent := [run.name for run in group if run.name not in shown]:
        caption.append(f"There is no room for {listed(absent)}: the tables have all.")
    return Figure("answer", _figure(panels), caption)


def has_every_bar(benches: Sequence[Bench]) -> bool:
    """Whether the first picture of a page of these benches, without runs, has all their candidates."""
    most = MOST_LANES if len(benches) == 1 else FEW_LANES
    shown = [{*_lanes_of([one.label for one in bench.ranked], most), FLOOR} for bench in benches]
    labels = [{one.label for one in bench.candidates} for bench in benches]
    return len(benches) <= MOST_PANELS and all(map(set.issuperset, shown, labels))


def _run_panel(group: Sequence[Run], most: int, is_split_at_floor: bool) -> Panel:
    ranked = ranked_runs(group)
    floor = next((run for run in group if is_floor(run.summary)), None)
    fastest = next((run for run in ranked if not is_disturbed(run.summary)), None)
    by_name = {run.name: run for run in group}
    found = []
    for name in dict.fromkeys([*_lanes_of([one.name for one in ranked], most), *([floor.name] if floor else [])]):
        one = by_name[name]
        mean, interval = one.seconds["mean"], one.seconds["interval_95"]
        parts = [(phase, one.summary["phases"][f"seconds_{phase}"] or 0.0) for phase in PHASES]
        if is_split_at_floor or not any(length for _, length in parts):
            parts = _split_at_floor(mean, floor.seconds["mean"] if floor else None)
        words = NO_GRADIENTS if one is floor else f"{plain(mean / fastest.seconds['mean'])} x" if fastest else ""
        words = DISTURBED if is_disturbed(one.summary) else words
        sent = max(one.summary["bytes_sent_per_iteration"], default=0)
        found.append(LabelledBar(name, parts, tuple(interval) if interval else None, words + _sent_words(sent)))
    return Panel("", found)


def _bench_panel(bench: Bench, most: int) -> Panel:
    floor, ranked = bench.candidate(FLOOR), bench.ranked
    shown = {one.label: one for one in bench.candidates}
    found = []
    for label in [*_lanes_of([one.label for one in ranked], most), *([FLOOR] if floor else [])]:
        one = shown[label]
        words = NO_GRADIENTS if one is floor or not ranked else _times(one, ranked[0])
        words = DISTURBED if bench.is_disturbed else words
        parts = _split_at_floor(one.seconds, floor.seconds if floor else None)
        found.append(LabelledBar(label, parts, one.quartiles, words + _sent_words(one.bytes_sent)))
    return Panel(bench.name, found)


def _times(one: CandidateSeconds, fastest: CandidateSeconds) -> str:
    """The ratio to DDP that the bench's table has; without DDP the ratio of the medians to the fastest."""
    ratio = 1.0 if one.label == DDP else one.ratio
    return f"{plain(one.seconds / fastest.seconds)} x" if ratio is None else f"{plain(ratio)} x {DDP}"


def _sent_words(sent: float | None) -> str:
    return f", {sent / 1e6:,.1f} MB" if sent else ""


def _split_at_floor(length: float, floor: float | None) -> list[tuple[str, float]]:
    """The parts of a bar: an iteration without communication, and what is exposed; one part if only one is known."""
    if floor is None:
        return [(WHOLE, length)]
    return [(WITHOUT_SYNC, min(length, floor)), (EXPOSED, max(0.0, length - floor))]


def _lanes_of(ranked: Sequence[str], most: int) -> list[str]:
    """Which names get one of `most` lanes where there are more: the fastest, DDP, and the slowest, in their order."""
    if len(ranked) <= most:
        return list(ranked)
    kept = {*ranked[: most - 2], DDP if DDP in ranked else ranked[most - 2], ranked[-1]}
    return [name for name in ranked if name in kept]


def _figure(panels: Sequence[Panel]) -> str:
    """The bars of each panel under one another."""
    counts = [len(panel.bars) for panel in panels]
    used = {word for panel in panels for lane in panel.bars for word, length in lane.parts if length > 0}
    words = [word for word in (*PHASES, *SPLIT_LOOKS) if word in used]

    def paint(figure):
        axes_of = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 0.5 for count in counts])[:, 0]
        for axes, panel in zip(axes_of, panels, strict=True):
            for place, lane in enumerate(panel.bars):
                bars(axes, [(ALL_LOOKS[word], length) for word, length in lane.parts], place)
                if lane.spread:
                    axes.plot(lane.spread, [place, place], "-", color="black", marker="|", markersize=6, linewidth=1)
                at = {"xycoords": ("axes fraction", "data"), "va": "center", "ha": "right", "fontsize": 9}
                axes.annotate(lane.words, (1, place - 0.34), **at)
            lanes(axes, [shortened(lane.name, 32) for lane in panel.bars], -0.34)
            if panel.title:
                axes.set_title(shortened(panel.title), loc="left")
        axes_of[-1].set_xlabel("seconds per iteration")
        legend_below(figure, [patch(*ALL_LOOKS[word]) for word in words], words)

    label = f"seconds per iteration of {listed([lane.name for panel in panels for lane in panel.bars])}"
    return draw("answer", label, 45 + sum(36 * count + 22 for count in counts), paint)
