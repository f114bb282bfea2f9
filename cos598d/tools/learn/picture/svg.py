"""A drawing as one SVG file: no script, nothing from elsewhere, light and dark, all text escaped."""

import textwrap
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from cos598d.terminal.colours import BLACK, SERIES, YELLOW
from cos598d.terminal.printable import printable

# Units of the drawing: on a phone of 360 pixels a unit is a pixel, and on a wide page it grows to WIDEST pixels.
WIDTH, MARGIN, LINE, WIDEST = 360, 8, 12, 760
LETTERS, HEAD_LETTERS, SMALL_LETTERS = 74, 52, 84  # of text in a line
# A colour for each rank; black is the ink's own, which is light on a dark page.
COLOURS = ["currentColor" if colour == BLACK else colour for colour in (*SERIES, YELLOW)]

STYLE = """
.{n}{{color:#1b1b1b;--paper:#fff;--faint:#6b6b6b;--track:#ececec;font:9px "DejaVu Sans",Verdana,Arial,sans-serif}}
@media (prefers-color-scheme:dark){{.{n}{{color:#e6e6e6;--paper:#16181c;--faint:#a0a0a0;--track:#2a2d33}}}}
.{n} text{{fill:currentColor}}
.{n} .paper{{fill:var(--paper)}}
.{n} .faint,.{n} .faint text{{fill:var(--faint)}}
.{n} .head{{font-size:11px;font-weight:bold}}
.{n} .small{{font-size:8px}}
"""


def tag(element: str, text: str | None = None, **attributes: object) -> str:
    """An element with escaped attributes; `text` is escaped too. `class_` is class, and "_" in a name is "-"."""
    words = "".join(
        f" {name.rstrip('_').replace('_', '-')}={quoteattr(_value(value))}"
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{element}{words}/>" if text is None else f"<{element}{words}>{clean(text)}</{element}>"


def group(inside: Iterable[str], **attributes: object) -> str:
    """Elements in one that has these attributes; "" if there are none."""
    inside = "".join(inside)
    return f"{tag('g', None, **attributes)[:-2]}>{inside}</g>" if inside else ""


def clean(text: str) -> str:
    """Text from anywhere, escaped for XML."""
    return escape(printable(text))


def number(value: float) -> str:
    """A length with at most one digit after the point."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as a part of a path."""
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"


def lines(words: str, x: float, y: float, letters: int = LETTERS, **attributes: object) -> tuple[list[str], float]:
    """Words as lines of text from baseline `y` on, and the next baseline below them."""
    found = []
    for line in textwrap.wrap(printable(words, 4000), letters, break_on_hyphens=False):
        found.append(tag("text", line, x=x, y=y, **attributes))
        y += LINE
    return found, y


def arrowhead(name: str) -> str:
    """The end of a line that has marker_end=url(#NAME-arrow)."""
    return (
        f'<defs><marker id="{name}-arrow" viewBox="0 0 6 6" refX="5.4" refY="3" markerWidth="5" markerHeight="5" '
        'orient="auto"><path d="M0 .6L6 3L0 5.4z" fill="currentColor"/></marker></defs>'
    )


def document(name: str, height: float, title: str, description: str, style: str, body: Sequence[str]) -> str:
    """The file: WIDTH by `height` units. `name` is of letters and hyphens, and begins every id and class in it."""
    style = STYLE.format(n=name) + style
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}" viewBox="0 0 {WIDTH} {number(height)}" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" style="max-width:{WIDEST}px;width:100%;height:auto">',
            f'<title id="{name}-title">{clean(title)}</title>',
            f'<desc id="{name}-desc">{escape(printable(description, 8000))}</desc>',
            f"<style>{escape(style)}</style>",
            tag("rect", width=WIDTH, height=height, class_="paper"),
            *body,
            "</svg>\n",
        ]
    )


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else printable(value)
