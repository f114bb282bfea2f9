"""Numbers, and lists of names, as text for a page."""

from collections.abc import Sequence
from typing import Any

from cos598d.records.kinds import NUMBER
from cos598d.terminal.words import listed, number_of


def seconds(value: float) -> str:
    """Seconds with three significant digits: "2.56 s", "0.0613 s"."""
    return f"{plain(value)} s"


def plain(value: float) -> str:
    """A number with three significant digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(f"{abs(value):e}".partition("e")[2]))
    return f"{value:,.{min(digits, 6)}f}"


def plain_or_none(value: float | None) -> str:
    """`plain`, or "-" for None."""
    return "-" if value is None else plain(value)


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number that a run can have come to."""
    return NUMBER.fits(value)


def cell(value: float | None, form: str) -> str:
    """A number in a format such as ".3f", or "-" for None and for what no run can have come to."""
    return format(value, form) if is_number(value) else "-"


def percent(share: float) -> str:
    """A share as "54 %"; "under 1 %" for a small one."""
    return "under 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def megabytes(value: float) -> str:
    """Bytes as megabytes of 1,000,000 bytes."""
    return f"{value / 1e6:,.3f}"


def mb_by_rank(values: Sequence[float], digits: int = 3) -> str:
    """Bytes by rank in megabytes; equal neighbours are combined: "272.568, 90.856 x 3"."""
    groups: list[list[Any]] = []
    for value in values:
        words = f"{value / 1e6:.{digits}f}"
        if groups and groups[-1][0] == words:
            groups[-1][1] += 1
        else:
            groups.append([words, 1])
    return ", ".join(words + (f" x {count}" if count > 1 else "") for words, count in groups)


def words_of(value: Any) -> str:
    """A setting's value as a table cell; a list's values are separated by commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(words_of, value)) or "-"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def names_of(names: Sequence[str], word: str, most: int = 4) -> str:
    """The names, or their number if there are more than `most`."""
    return listed(list(names)) if len(names) <= most else number_of(len(names), word)
