"""Tables as aligned text for the screen, and in Markdown. A table is a list of rows, the first of them its header."""

import html
import re
import textwrap
from collections.abc import Sequence

from cos598d.terminal.printable import printable

Rows = Sequence[Sequence[str]]
WIDTH = 118  # of a report's lines, in characters


def as_text(rows: Rows, numbers: bool = False) -> str:
    """Lines for the screen, aligned left; with `numbers`, all columns except the first are aligned right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def filled(text: str, indent: str = "", hanging: str = "  ") -> str:
    """Lines of at most WIDTH: `indent` begins all of them, and `hanging` all except the first. Words stay whole."""
    lines = textwrap.TextWrapper(WIDTH, indent, indent + hanging, break_long_words=False, break_on_hyphens=False)
    return lines.fill(text)


def as_markdown(rows: Rows) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def markdown_text(text: str) -> str:
    """Text that Markdown shows unchanged: no marks, no HTML, no new cell or line of a table."""
    text = printable(" ".join(html.escape(text, quote=False).split()))
    # An underscore inside a word is no mark, and all_reduce is easier to read without a backslash.
    return re.sub(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
