"""Speed-up and efficiency as a function of the number of hosts, drawn by matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from cos598d.cost.scaling import Point
from cos598d.errors import UserError
from cos598d.records.conventions import FLOOR
from cos598d.terminal.colours import SERIES
from cos598d.terminal.files import whole_file

DASHES = ("--", ":", "-.")


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write two panels with a line per sync: dots for measurements, broken lines for predictions.

    Raises UserError without matplotlib, or if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib. Run `pip install -e '.[report]'` in the project's folder.") from None
    figure = Figure(figsize=(12, 5), layout="constrained")
    speed, share = figure.subplots(1, 2)
    counts = sorted({point.hosts for point in points})
    speed.plot(counts, counts, color="0.75", linewidth=4, label="linear", zorder=1)
    # The floor is the straight line, by definition.
    for place, label in enumerate(dict.fromkeys(point.sync for point in points if point.sync != FLOOR)):
        line = [point for point in points if point.sync == label]
        measured = [point for point in line if point.measured_seconds]
        style = {"color": SERIES[place % len(SERIES)]}
        dashes = DASHES[place // len(SERIES) % len(DASHES)]  # a colour's second line has other dashes
        for axes, value in ((speed, lambda p: p.speed_up), (share, lambda p: p.speed_up / p.hosts)):
            axes.plot([p.hosts for p in line], [value(p) for p in line], dashes, linewidth=1.3, **style)
            found = [value(p) * p.seconds / p.measured_seconds for p in measured]
            axes.plot([p.hosts for p in measured], found, "o", markersize=7, **style)
        speed.plot([], [], f"{dashes}o", label=label, **style)
    for axes, words in ((speed, "speed-up over one host"), (share, "efficiency")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2 if axes is speed else 10)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("hosts")
        axes.set_ylabel(words)
        axes.grid(True, which="both", color="0.92")
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside right center", fontsize="small")
    figure.suptitle(f"{title}\ndots: measured; broken lines: predicted", fontsize="medium")
    try:
        with whole_file(path, "wb") as file:
            figure.savefig(file, format=path.suffix[1:].lower())
    except OSError as error:
        raise UserError(f"the drawing cannot be written to {path} ({error.strerror}). Give another path.") from None
