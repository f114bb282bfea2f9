"""Plots as SVG that a page can carry inline: text as text, ids of their own, the same bytes for the same records."""

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from cos598d.terminal.colours import BLUE, GREEN, GREY, PURPLE, SERIES, SKY, VERMILLION, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

# 320 units wide: on a phone of 360 pixels a unit is about a pixel, and the text stays at 10.
WIDTH_INCHES = 320 / 72
# Beside the colours, for whoever sees none.
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# A phase has one look on the whole page. Hatches, for whoever does not see the colours.
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
    "text.parse_math": False,  # a run may be called a$b$
    "text.usetex": False,
    "svg.fonttype": "none",
}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}"


def draw(name: str, label: str, height: float, paint: Callable[["Figure"], None]) -> str:
    """What `paint` puts on a figure of `height` units, as SVG whose ids begin with `name`, read aloud as `label`.

    A legend adds its own height.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The user's own matplotlibrc must not change the page.
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE | {"svg.hashsalt": name})
        # A run's name may have letters that the font that measures the text lacks; the reader's font may have them.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        figure = Figure(figsize=(WIDTH_INCHES, height / 72), layout="constrained")
        paint(figure)
        output = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(output)
    return _finish(output.getvalue(), name, label)


def line_style(place: int) -> dict:
    """Colour, line and marker of the series at `place`; they repeat at different places, and so differ together."""
    return {
        "color": SERIES[place % len(SERIES)],
        "linestyle": LINES[place % len(LINES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def legend_below(figure: "Figure", handles: list, labels: list[str]) -> None:
    """A legend under the plot, in one column where labels are long."""
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


def patch(colour: str, hatch: str) -> "Patch":
    """What a legend shows of a look."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, hatch=hatch, edgecolor="white")


def shortened(name: str, letters: int = 40) -> str:
    """A name cut in the middle to what fits beside a plot; the tables have it whole."""
    return name if len(name) <= letters else f"{name[: letters // 2 - 1]}…{name[-letters // 2 :]}"


def lanes(axes: "Axes", names: Sequence[str], above: float) -> None:
    """A lane for each name, from the top, the name over what is drawn: long ones would leave a phone no plot."""
    for place, name in enumerate(names):
        axes.annotate(shortened(name), (0, place + above), xycoords=("axes fraction", "data"), va="center")
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlim(left=0)
    axes.spines["left"].set_visible(False)


def swept_axis(axes: "Axes", values: Sequence[float]) -> None:
    """A tick at each of the values that a setting takes, in ascending order; logarithmic where they are far apart."""
    if values[0] > 0 and values[-1] / values[0] >= 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def inline(svg: str) -> str:
    """The plot for an HTML page, where an svg element needs no namespace."""
    return svg.replace(f' xmlns="{_SVG}"', "", 1)


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
    """A style's parts as attributes, a font in its long form: every renderer knows these."""
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
