"""Figures of benches: every candidate's seconds, split at the floor, and their ratio to DDP against a setting."""

from collections.abc import Sequence

from cos598d.records.conventions import DDP, FLOOR
from cos598d.terminal.colours import DARK_GREY, GREY, SKY, VERMILLION
from cos598d.terminal.words import listed
from cos598d.tools.report.benches import Bench, common_labels
from cos598d.tools.report.settings import UNITS, value_in
from cos598d.tools.report.svg import draw, legend_below, line_style, shortened, swept_axis

# Told apart by their place too, the floor first; hatches would make a browser's PDF large.
COMPUTE, EXPOSED, WHOLE = SKY, VERMILLION, GREY
LOOKS = {"without any sync": COMPUTE, "exposed communication": EXPOSED, "whole, floor not measured": WHOLE}
# Ticks of a ratio: where all are near 1, and where they are not.
NEAR, FAR = (
    (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2),
    (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50),
)


def ladder_figure(benches: Sequence[Bench]) -> str | None:
    """A panel for each bench, slowest first: the floor's seconds, then what is exposed, the quartiles, the ratio."""
    benches = [bench for bench in benches if bench.candidates]
    if not benches:
        return None
    counts = [len(bench.candidates) for bench in benches]

    def paint(figure):
        from matplotlib.patches import Patch

        panels = figure.subplots(len(benches), 1, squeeze=False, height_ratios=[count + 1 for count in counts])
        for axes, bench in zip(panels[:, 0], benches, strict=True):
            _paint_bench(axes, bench)
        panels[-1, 0].set_xlabel("seconds an iteration; times DDP's at the end")
        has_floor = {bench.candidate(FLOOR) is not None for bench in benches}
        words = [word for word, look in LOOKS.items() if (look != WHOLE) in has_floor]
        handles = [Patch(facecolor=LOOKS[word]) for word in words]
        legend_below(figure, handles, words)

    label = f"seconds an iteration of every candidate of {listed([bench.name for bench in benches])}"
    return draw("ladder", label, sum(40 + 17 * count for count in counts) + 20, paint)


def _paint_bench(axes, bench: Bench) -> None:
    ranked = sorted(bench.candidates, key=lambda one: -one.seconds)
    floor = bench.candidate(FLOOR)
    longest = max(max(one.quartiles) for one in ranked)
    for place, one in enumerate(ranked):
        split = min(one.seconds, floor.seconds) if floor else one.seconds
        axes.barh(place, split, 0.66, color=COMPUTE if floor else WHOLE)
        axes.barh(place, one.seconds - split, 0.66, split, color=EXPOSED)
        axes.plot(one.quartiles, [place, place], "-", color="black", linewidth=1)
        if one.ratio is not None:
            at = max(one.seconds, *one.quartiles) + 0.01 * longest
            axes.text(at, place, f"{one.ratio:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(ranked)), [shortened(one.label, 18) for one in ranked])
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * longest)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_title(shortened(bench.name), loc="left")


def sweep_figure(word: str, series: Sequence[Sequence[Bench]], name: str) -> str | None:
    """Each candidate's ratio to DDP against the setting `word`; None where no series has a candidate in common."""
    unit, _ = UNITS[word]
    lines = [(benches, label) for benches in series for label in common_labels(benches)]
    if not lines:
        return None

    def paint(figure):
        axes = figure.subplots()
        handles = [axes.axhline(1, color=DARK_GREY, linestyle=":")]
        for place, (benches, label) in enumerate(lines):
            values = [value_in(bench, word) for bench in benches]
            ratios = [bench.measured(label).ratio for bench in benches]
            handles += axes.plot(values, ratios, **line_style(place))
        swept_axis(axes, sorted({value_in(bench, word) for benches, _ in lines for bench in benches}))
        axes.set_xlabel(unit)
        axes.set_title("times DDP's seconds an iteration", loc="left")
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        ticks = [tick for tick in (NEAR if high < 4 * low else FAR) if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        words = [f"{label}, {benches[0].name} on" if len(series) > 1 else label for benches, label in lines]
        legend_below(figure, handles, [DDP, *words])

    return draw(name, f"ratio to DDP against {word}", 260, paint)
