"""Tables as text."""

from collections.abc import Sequence

from cos598d.terminal.printable import printable


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Words to the left, numbers to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
