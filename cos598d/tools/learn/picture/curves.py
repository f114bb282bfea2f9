"""Curves of what a step did, for lessons in which no rank waits for another: one below the other, or in one drawing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cos598d.terminal.printable import printable
from cos598d.tools.learn.picture.svg import COLOURS, MARGIN, WIDTH, document, lines, number, tag
from cos598d.tools.learn.picture.text import Letters

ROWS = 8  # of a curve in letters
LEFT, TOP, HEIGHT = 34, 36, 150  # of the plot in a drawing
MOST_CURVES, MOST_POINTS = 4, 5000
NO_CURVES = "a rank reported something other than its curves"


@dataclass(frozen=True)
class Curves:
    """Lines by name, each of points (x, y) with y from 0 on; and in words what x and y are."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]

    @classmethod
    def from_json(cls, found: dict[str, Any], title: str) -> "Curves":
        """What a rank reported: x, y and lines. Raises ValueError for anything else: a file may have written it."""
        try:
            drawn = {str(name): [(float(x), float(y)) for x, y in points] for name, points in found["lines"].items()}
            words = str(found["x"]), str(found["y"])
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
            raise ValueError(NO_CURVES) from None
        values = [value for points in drawn.values() for point in points for value in point]
        are_few = 0 < len(drawn) <= MOST_CURVES and all(1 < len(points) <= MOST_POINTS for points in drawn.values())
        if not are_few or not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(NO_CURVES)
        return cls(printable(title, 80), printable(words[0], 60), printable(words[1], 60), drawn)

    @property
    def _ends(self) -> tuple[float, float]:
        """The greatest x and y."""
        points = [point for line in self.lines.values() for point in line]
        return max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0

    def text(self, width: int, letters: Letters) -> str:
        """For a terminal `width` letters wide: a column has the highest y of its part of x, or is interpolated."""
        right, top = self._ends
        label = 8
        columns = max(width - label, 20)
        rows = [f"{self.title}: {self.y}"]
        for name, points in self.lines.items():
            highest: dict[int, float] = {}
            for x, y in points:
                place = min(int(x / right * columns), columns - 1)
                highest[place] = max(highest.get(place, 0.0), y)
            places = sorted(highest)
            heights = np.interp(range(columns), places, [highest[place] for place in places])
            rows += ["", printable(name, width)]
            for row in range(ROWS, 0, -1):
                mark = f"{top * row / ROWS:.3g}".rjust(label - 1) + " "
                filled = (letters.computing if height > top * (row - 0.5) / ROWS else " " for height in heights)
                rows.append((mark + "".join(filled)).rstrip())
        rows.append(" " * label + self.x)
        return "\n".join(rows)

    def svg(self, name: str = "curves") -> str:
        """As one SVG file; `name`, of letters and hyphens, begins its ids and classes."""
        right, top = self._ends
        plot = WIDTH - LEFT - MARGIN
        body, _ = lines(self.title, MARGIN, 16, class_="head")
        body.append(tag("text", self.y, x=MARGIN, y=28, class_="faint"))
        for part in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = TOP + HEIGHT * (1 - part)
            body.append(tag("path", d=f"M{LEFT} {number(y)}h{plot}", class_="grid"))
            body.append(tag("text", f"{top * part:.3g}", x=LEFT - 4, y=y + 3, text_anchor="end", class_="small"))
        below = TOP + HEIGHT + 12
        body.append(tag("text", self.x, x=LEFT + plot, y=below, text_anchor="end", class_="faint"))
        for place, (words, points) in enumerate(self.lines.items()):
            colour = COLOURS[place % len(COLOURS)]
            at = " ".join(
                f"{number(LEFT + x / right * plot)},{number(TOP + HEIGHT * (1 - y / top))}" for x, y in points
            )
            body.append(tag("polyline", points=at, fill="none", stroke=colour, stroke_width=1.4))
            below += 13
            body.append(tag("path", d=f"M{LEFT} {number(below - 3)}h16", stroke=colour, stroke_width=2))
            body.append(tag("text", words, x=LEFT + 22, y=below))
        style = f".{name} .grid{{stroke:var(--track);stroke-width:.7}}"
        says = f"{self.title}: {self.y}, over {self.x}: {', '.join(self.lines)}"
        return document(name, below + MARGIN, self.title, says, style, body)
