"""The figures of a page. Each paints runs or benches, and returns None where there is nothing to draw."""

import base64
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from cos598d.records.bench import Bench
from cos598d.records.conventions import FLOOR, NOT_METRICS, PHASES, WARM_UP
from cos598d.terminal.colours import BLUE, GREEN, GREY, PURPLE, SERIES, SKY, VERMILLION, YELLOW
from cos598d.tools.report.records import Run

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a run's name may be a$b$
    "svg.hashsalt": "cos598d",
}
# A phase looks the same on the whole page. Hatches, lines and markers are for readers who cannot see the colours.
PHASE_COLOURS = dict(zip(PHASES, (GREY, SKY, BLUE, VERMILLION, YELLOW, GREEN, PURPLE), strict=True))
HATCHES = {"sync": "///", "step": "\\\\\\", "checkpoint": "..."}
LINES, MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v", "P", "X")
MOST_POINTS, MOST_DOTS, MOST_PANELS = 300, 200, 4


def as_image(figure: Figure) -> str:
    """The figure as the `src` of an <img>: a document of its own, whose ids and styles meet no others."""
    output = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")  # names may have letters that the font lacks
        FigureCanvasSVG(figure).print_svg(output, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(rb"<!--.*?-->", b"", output.getvalue(), flags=re.DOTALL)  # they have the texts as they came
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def style() -> Any:
    """A context in which figures look as on the page, whatever the user's own matplotlibrc says."""
    return mpl.rc_context({**mpl.rcParamsDefault, "backend": "svg", **STYLE})


def seconds(runs: Sequence[Run]) -> Figure | None:
    """A bar for each run of its phases, with the mean's interval; above it a dot for each iteration."""
    runs = [run for run in runs if run.mean is not None]
    if not runs:
        return None
    figure, (axes,) = _panels(1, 1.1 + 0.4 * len(runs))
    for place, run in enumerate(runs):
        left = 0.0
        for phase in PHASES:
            length = run.summary.phases.get(f"seconds_{phase}") or 0.0
            _bar(axes, phase, left, length, place, 0.4, label=phase if place == 0 else None)
            left += length
        own = run.iterations()["seconds"].to_numpy()[WARM_UP:]
        dots = own[:: -(-len(own) // MOST_DOTS)]
        axes.plot(dots, np.full(len(dots), place - 0.33), ".", color=GREY, markersize=3, alpha=0.6)
        axes.plot([run.mean], [place], "|k", markersize=9)
        interval = run.summary.seconds_per_iteration.interval_95
        axes.plot(interval or [], [place] * len(interval or []), "k-", linewidth=1)
    _lanes(axes, [run.name for run in runs])
    axes.set_xlabel("seconds per step: phases, the mean with\nits 95 %, and a dot for each iteration")
    axes.set_xlim(left=0)
    figure.legend(loc="outside upper left", ncols=4)
    return figure


def losses(runs: Sequence[Run]) -> Figure | None:
    """The loss and the learning rate against the iteration; of long runs a point is a mean of some."""
    runs = [run for run in runs if len(run.summary.losses) > 1]
    if not runs:
        return None
    figure, (above, below) = _panels(2)
    for place, run in enumerate(runs):
        rows = run.iterations()[["iteration", "loss", "learning_rate"]].astype(float)
        points = rows.groupby(np.arange(len(rows)) // -(-len(rows) // MOST_POINTS)).mean()
        look = _look(place) | {"markevery": max(5, len(points) // 8), "markersize": 4}
        above.plot(points["iteration"], points["loss"], label=_shortened(run.name), **look)
        below.plot(points["iteration"], points["learning_rate"], **look)
    above.set_title("loss")
    below.set(title="learning rate", xlabel="iteration")
    _legend(figure, len(runs))
    return figure


def epochs(runs: Sequence[Run]) -> Figure | None:
    """Every metric after each whole epoch, and the training's mean loss; the first panel has both losses."""
    rows = {run.name: pd.DataFrame([row for row in run.summary.epochs if not row.get("is_cut")]) for run in runs}
    rows = {name: found.set_index("epoch") for name, found in rows.items() if len(found) > 1}
    if not rows:
        return None
    metrics = dict.fromkeys(name for found in rows.values() for name in found.select_dtypes("number"))
    names = [name for name in metrics if name not in NOT_METRICS and name != "validation_loss"][: MOST_PANELS - 1]
    figure, panels = _panels(1 + len(names))
    for place, (name, found) in enumerate(rows.items()):
        for kind, column, line in (("training", "loss", "--"), ("validation", "validation_loss", "-")):
            if column in found:
                look = _look(place) | {"linestyle": line, "label": f"{_shortened(name)}, {kind}"}
                panels[0].plot(found[column], **look)
        for axes, metric in zip(panels[1:], names, strict=True):
            if metric in found:
                axes.plot(found[metric].astype(float), **_look(place))
    for axes, title in zip(panels, ("mean loss", *names), strict=True):
        axes.set_title(title)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel("epoch")
    _legend(figure, 2 * len(rows))
    return figure


def timeline(run: Run) -> Figure | None:
    """Rank 0's typical iteration: its phases and, below, the calls that carry gradients.

    A call that runs during backward ends when it really ended, whoever waits for it.
    """
    typical = run.typical()
    if typical is None:
        return None
    made = [call for call in run.calls(typical.iteration) if call["purpose"] == "gradients"]
    calls = [(call["started"], call["seconds"]) for call in made if None not in (call["started"], call["seconds"])]
    figure, (axes,) = _panels(1, 2.6 if calls else 1.4)
    for phase, start, length in typical.spans_seconds:
        _bar(axes, phase, start, length, 0, 0.8)
    height = 4 / max(4, len(calls))
    for number, (start, length) in enumerate(calls):
        axes.barh(1 + number * height, length, height, start, color=VERMILLION)
    axes.set_yticks([0, 1] if calls else [0], ["phases", f"{len(calls)} calls"][: 1 + bool(calls)])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(title=f"{_shortened(run.name)}, iteration {typical.iteration}", xlabel="seconds since the iteration began")
    used = [phase for phase in PHASES if phase in {span[0] for span in typical.spans_seconds}]
    for phase in used:
        _bar(axes, phase, 0, 0, 0, 0, label=phase)
    figure.legend(loc="outside upper left", ncols=4)
    return figure


def lines(table: pd.DataFrame, x: str, ys: Sequence[str], by: Sequence[str]) -> Figure | None:
    """A panel for each of `ys` against the setting `x`: a line for each combination of the settings in `by`, and a bar
    from the least to the most of repeats. What a sweep and a scaling have in common."""
    groups = [own for _, own in table.groupby([*by], sort=False, dropna=False) if own[x].nunique() > 1]
    drawn = pd.concat([own.iloc[:1] for own in groups]) if groups else table.iloc[:0]
    apart = [name for name in by if drawn[name].astype(str).nunique() > 1] or by[:1]
    ys = [y for y in ys if any(own.dropna(subset=[y])[x].nunique() > 1 for own in groups)][:MOST_PANELS]
    if not ys:
        return None
    figure, panels = _panels(len(ys))
    ticks = sorted({value for own in groups for value in own[x].dropna()})
    for axes, y in zip(panels, ys, strict=True):
        for place, own in enumerate(groups):
            label = ", ".join(str(own[name].iloc[0]) for name in apart)
            found = own.groupby(x)[y].agg(["mean", "min", "max"]).dropna()
            spread = [found["mean"] - found["min"], found["max"] - found["mean"]]
            look = _look(place) | {"label": _shortened(label) if y == ys[0] else None}
            axes.errorbar(found.index, found["mean"], spread, capsize=3, **look)
        axes.set_title(y)
        if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    panels[-1].set_xlabel(x)
    _legend(figure, len(groups))
    return figure


def ladder(name: str, bench: Bench) -> Figure | None:
    """A bench's candidates, slowest first: the floor's seconds, what is exposed, the quartiles, the ratio to DDP."""
    found = sorted(bench.summary.items(), key=lambda item: -item[1].seconds_median)
    if not found:
        return None
    floor = bench.summary[FLOOR].seconds_median if FLOOR in bench.summary else np.inf
    figure, (axes,) = _panels(1, 1.1 + 0.25 * len(found))
    names = ("without any sync", "exposed") if FLOOR in bench.summary else ("none was not measured", None)
    for place, (_, one) in enumerate(found):
        split, ends = min(floor, one.seconds_median), one.seconds_quartiles or (one.seconds_median,) * 2
        without, beyond = (None, None) if place else names
        axes.barh(place, split, color=SKY, label=without)
        axes.barh(place, one.seconds_median - split, left=split, color=VERMILLION, label=beyond)
        axes.plot(ends, [place, place], "k-", linewidth=1)
        ratio = f"  {one.ratio_to_ddp.median:.2f}" if one.ratio_to_ddp else ""
        axes.text(max(*ends, one.seconds_median), place, ratio, va="center", fontsize=8)
    _lanes(axes, [label for label, _ in found])
    axes.set(title=_shortened(name), xlabel="seconds per iteration: medians and\nquartiles; the number is times ddp's")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _panels(count: int, height: float = 2.2) -> tuple[Figure, Any]:
    """A figure with panels under one another."""
    figure = Figure(figsize=(4.8, height * count), layout="constrained")
    return figure, figure.subplots(count, 1, squeeze=False)[:, 0]


def _bar(axes: Any, phase: str, left: float, length: float, y: float, height: float, label: str | None = None) -> None:
    look = {"color": PHASE_COLOURS.get(phase), "hatch": HATCHES.get(phase), "edgecolor": "white", "linewidth": 0.3}
    axes.barh(y, length, height, left, label=label, **look)


def _look(place: int) -> dict[str, Any]:
    """Colour, line and marker of a series; they have different periods, so combinations differ."""
    names = {"color": SERIES, "linestyle": LINES, "marker": MARKERS}
    return {name: known[place % len(known)] for name, known in names.items()}


def _lanes(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_shortened(name) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _legend(figure: Figure, count: int) -> None:
    rows = -(-count // 2)
    figure.set_figheight(figure.get_figheight() + 0.17 * rows)
    figure.legend(loc="outside upper left", ncols=min(2, count))


def _shortened(name: str, letters: int = 28) -> str:
    """A name cut in the middle to fit next to a plot; the tables have the full name."""
    name = f" {name}" if name.startswith("_") else name  # which matplotlib would leave out of a legend
    return name if len(name) <= letters else f"{name[: letters // 2 - 1]}…{name[-letters // 2 :]}"
