"""How something grows with the number of ranks: the exponent of a power law, a table's row of them, and a drawing."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from cos598d.terminal.colours import SERIES
from cos598d.terminal.files import whole_file

FROM = 16  # ranks: for fewer, the constant part hides the growing one
FEWEST = 3  # points of a fit
MARKERS = "osD^vP*X"


def exponent(by_ranks: Mapping[int, float]) -> float | None:
    """The p of c n^p that best fits the values by number of ranks n: least squares on the logarithms.

    It uses the numbers from FROM up if there are enough, otherwise all. None for fewer than FEWEST, or if a value is
    not positive.
    """
    points = [(n, value) for n, value in by_ranks.items() if n >= FROM]
    points = points if len(points) >= FEWEST else list(by_ranks.items())
    if len(points) < FEWEST or any(value <= 0 for _, value in points):
        return None
    x, y = ([math.log(number) for number in numbers] for numbers in zip(*points, strict=True))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covered = sum((one - mean_x) ** 2 for one in x)
    return sum((one - mean_x) * (other - mean_y) for one, other in zip(x, y, strict=True)) / covered


def in_words(by_ranks: Mapping[int, float]) -> str:
    """The exponent for a table."""
    found = exponent(by_ranks)
    return "" if found is None else f"n^{found:.2f}"


def draw(path: Path, panels: Mapping[str, Mapping[str, Mapping[int, float]]], title: str) -> None:
    """Write an SVG: a panel per axis title, with a line per name of values by the number of ranks."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (words, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        shown = {name: {n: value for n, value in line.items() if value > 0} for name, line in lines.items()}
        for place, (name, line) in enumerate(shown.items()):
            label = f"{name}  {in_words(line)}".rstrip()
            style = {"color": SERIES[place % len(SERIES)], "marker": MARKERS[place % len(MARKERS)], "label": label}
            style["linestyle"] = "-" if place < len(SERIES) else "--"
            axes.plot(list(line), list(line.values()), linewidth=1.3, markersize=5, **style)
        counts: Sequence[int] = sorted({n for line in shown.values() for n in line})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("ranks")
        axes.set_ylabel(words)
        axes.grid(True, which="major", color="0.92")
        axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    with whole_file(path, "wb") as file, matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
