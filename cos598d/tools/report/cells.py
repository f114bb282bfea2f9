"""Numbers as text, at the very end: until a table is printed, its cells are numbers."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_text
from cos598d.terminal.words import listed

# A table: a row is its cells by column. A cell that is None is not known.
Rows = Sequence[Mapping[str, Any]]


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float

    def meets(self, other: "Interval") -> bool:
        """Whether they leave no gap."""
        return self.low <= other.high and other.low <= self.high


class Spread(NamedTuple):
    """A figure with its 95 % confidence interval, or with the least and the most."""

    value: float
    low: float
    high: float


def shown(value: Any) -> str:
    """A cell as text: four significant digits, two below 0.001; of a list equal neighbours once: "272.6, 90.86 x 3"."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Interval):
        return f"{shown(value.low)} to {shown(value.high)}"
    if isinstance(value, Spread):
        return f"{shown(value.value)} ({shown(value.low)} to {shown(value.high)})"
    if isinstance(value, dict):
        return ", ".join(f"{printable(name)} {shown(own)}" for name, own in value.items())
    if isinstance(value, list | tuple):
        runs = [(word, len(list(same))) for word, same in groupby(map(shown, value))]
        return ", ".join(word if count == 1 else f"{word} x {count}" for word, count in runs) or "-"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2g}"
    return printable(value, 200)


def exact(value: Any) -> str:
    """A setting as text: two settings that differ in the last digit look different."""
    return (
        printable(value, 200) if isinstance(value, int | float | str) and not isinstance(value, bool) else shown(value)
    )


def fastest_of(near: Sequence[str], other: str) -> str:
    """The sentence on the fastest ones, each in words, and the next one."""
    if len(near) > 1:
        return f"Fastest: {listed(near)} are too close to call."
    return f"Fastest: {near[0]}, before {other}. Other networks and machines give another order."


def texts(rows: Rows, columns: Sequence[str] | None = None) -> list[list[str]]:
    """A head and a row of text for each row; without columns of which nothing is known."""
    columns = columns or list(dict.fromkeys(name for row in rows for name in row))
    used = [name for name in columns if any(row.get(name) is not None for row in rows)]
    return [[*map(printable, used)], *([shown(row.get(name)) for name in used] for row in rows)]


def as_lines(rows: Rows, columns: Sequence[str] | None = None) -> str:
    """The table for the screen."""
    return as_text(texts(rows, columns))
