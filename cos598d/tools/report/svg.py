"""Plots as SVG for inline use: text as text, unique ids, the same bytes for the same records."""

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from cos598d.terminal.colours import BLUE, GREEN, GREY, PURPLE, SERIES, SKY, VERMILLION, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

# 320 units wide: on a phone of 360 pixels a unit is about a pixel, and the text stays at 10.
WIDTH_INCHES = 320 / 72
# In addition to colours, for readers who cannot see them.
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# A phase looks the same on the whole page. Hatches are for readers who cannot see the colours.
PHASE_LOOKS = {
    "data": (GREY, ""),
    "forward": (SKY, ""),
    "backward": (BLUE, ""),
    "sync": (VERMILLION, "///"),
    "clip": (YELLOW, ""),
    "step": (GREEN, "\\\\\\"),
    "checkpoint": (PURPLE, "..."),
    "between": ("#ffffff", ""),
}
STYLE: dict[Any, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # a run's name may be a$b$
    "text.usetex": False,
    "svg.fonttype": "none",
}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}"


def draw(name: str, label: str, height: float, paint: Callable[["Figure"], None]) -> str:
    """The result of `paint` on a figure of `height` units, as SVG whose ids begin with `name`, with the label `label`.

    A legend adds its own height.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The user's own matplotlibrc must not change the page.
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE | {"svg.hashsalt": name})
        # A run's name may have letters that the measuring font lacks; the reader's font may have them.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        figure = Figure(figsize=(WIDTH_INCHES, height / 72), layout="constrained")
        paint(figure)
        output = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(output)
    return _finish(output.getvalue(), name, label)


def line_style(place: int) -> dict:
    """Colour, line and marker of the series number `place`; they have different periods, so combinations differ."""
    return {
        "color": SERIES[place % len(SERIES)],
        "linestyle": LINES[place % len(LINES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def legend_below(figure: "Figure", handles: list, labels: list[str]) -> None:
    """A legend under the plot, in one column if labels are long."""
    # matplotlib leaves out a label that begins with "_".
    labels = [f" {label}" if label.startswith("_") else label for label in map(shortened, labels)]
    columns = max(1, min(4, 44 // (max(map(len, labels)) + 6)))
    figure.set_figheight(figure.get_figheight() + (6 + 14 * -(-len(labels) // columns)) / 72)
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, handlelength=3)


def bar(axes: "Axes", look: tuple[str, str], left: float, length: float, y: float, height: float) -> None:
    """A part of a bar, if it has a length."""
    colour, hatch = look
    if length > 0:
        axes.barh(y, length, height, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)


def bars(axes: "Axes", parts: Iterable[tuple[tuple[str, str], float]], y: float) -> None:
    """A bar of parts from left to right, each with its look and its length."""
    left = 0.0
    for look, length in parts:
        bar(axes, look, left, length, y, 0.36)
        left += length


def patch(colour: str, hatch: str) -> "Patch":
    """A legend's sample of a look."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, hatch=hatch, edgecolor="white")


def shortened(name: str, letters: int = 40) -> str:
    """A name cut in the middle to fit next to a plot; the tables have the full name."""
    return name if len(name) <= letters else f"{name[: letters // 2 - 1]}…{name[-letters // 2 :]}"


def lanes(axes: "Axes", names: Sequence[str], above: float) -> None:
    """A lane for each name, from the top, with the name above it, since a long one would leave no plot."""
    for place, name in enumerate(names):
        axes.annotate(shortened(name), (0, place + above), xycoords=("axes fraction", "data"), va="center")
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlim(left=0)
    axes.spines["left"].set_visible(False)


def swept_axis(axes: "Axes", values: Sequence[float]) -> None:
    """A tick at each value of a setting, in ascending order; logarithmic if they are far apart."""
    if values[0] > 0 and values[-1] / values[0] >= 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def inline(svg: str) -> str:
    """The plot for an HTML page, in which an svg element needs no namespace."""
    return svg.replace(f' xmlns="{_SVG}"', "", 1)


def label_of(svg: str) -> str:
    """What the plot shows, in words: the label that `draw` got."""
    return ElementTree.fromstring(svg).attrib["aria-label"]


def _finish(svg: bytes, name: str, label: str) -> str:
    """matplotlib's SVG without its date, sizes and page-wide styles, and with ids that no other plot has."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            value = f"{name}-{value}" if key == "id" else re.sub(r"url\(#", f"url(#{name}-", value)
            if key == f"{_XLINK}href":
                key, value = "href", value.replace("#", f"#{name}-", 1)
            if key == "style":
                for part, worth in _declarations(value):
                    element.set(part, worth)
            else:
                element.set(key, value)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label} | {
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
    }
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _declarations(style: str) -> Iterator[tuple[str, str]]:
    """A style's parts as attributes, a font in its long form: every renderer supports these."""
    for declaration in style.split(";"):
        part, _, worth = (word.strip() for word in declaration.partition(":"))
        if part == "font":
            size, _, family = worth.rpartition("px ")
            *weight, size = size.split()
            yield "font-size", size
            yield "font-family", family
            with contextlib.suppress(IndexError):
                yield "font-weight", weight[-1]
        elif part:
            yield part, worth
