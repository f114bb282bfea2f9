"""Reading JSON files of a record and checking their kinds. A damaged file is reported with its first wrong field."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.kinds import DEEPEST, ValueKind, fault, is_too_deep
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import MOST_BYTES, lines_of, open_plain, parse_json, read_plain

MOST_ROW = 16 << 20  # characters; an epoch's row with a thousand classes has some 5 million
STEP = 1 << 16  # bytes, of which a last row is looked for


def read(path: Path, kind: ValueKind, remedy: str, most: int = MOST_BYTES) -> Any:
    """The value of a JSON file, of this kind. Raises OSError as `open`, and UserError for a damaged file.

    Its text is made printable here, so that nothing hostile reaches a terminal or a page.
    """
    try:
        return _checked(read_plain(path, most).decode("utf-8"), kind, str(path), remedy)
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged: not UTF-8. {remedy}.") from None


def read_rows(path: Path, kind: ValueKind, remedy: str, grows: bool = False) -> Iterator[Any]:
    """The values of a JSON-lines file, one by one, each of this kind. Raises as `read`.

    If a file `grows`, or its writer was killed, the last row may be incomplete: it is skipped.
    """
    try:
        with open_plain(path) as lines:
            for number, line in enumerate(lines_of(lines, MOST_ROW), start=1):
                if len(line) == MOST_ROW:
                    raise too_long(path, number, remedy)
                if not line.endswith("\n"):
                    if grows:
                        return
                    raise not_whole(path, number, remedy)
                yield parse_row(line, kind, path, remedy, number)
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged: not UTF-8 text. {remedy}.") from None


def last_row(path: Path, kind: ValueKind, remedy: str) -> Any:
    """The last value of a JSON-lines file, of this kind, without reading the others; None if there is none. Raises as
    `read`."""
    tail = b""
    with open_plain(path, "rb") as file:
        begin = file.seek(0, os.SEEK_END)
        while begin > 0 and len(tail) < MOST_ROW and b"\n" not in tail[:-1]:
            length = min(begin, STEP)
            begin = file.seek(begin - length)
            tail = file.read(length) + tail
    if not tail:
        return None
    if not tail.endswith(b"\n"):
        raise UserError(f"{path} is damaged: its last row is not complete. {remedy}.")
    line = tail[:-1].rpartition(b"\n")[2].decode("utf-8", "replace")
    return _checked(line, kind, f"{path}, last line", remedy)


def not_whole(path: Path, line: int, remedy: str) -> UserError:
    """The error for a last line that does not end."""
    return UserError(f"{path}, line {line} is damaged: not a complete JSON row. {remedy}.")


def too_long(path: Path, line: int, remedy: str) -> UserError:
    """The error for a line that is longer than any row of ours."""
    return UserError(f"{path}, line {line} has more than {MOST_ROW >> 20} MiB: it is damaged. {remedy}.")


def parse_row(text: str, kind: ValueKind, path: Path, remedy: str, line: int) -> Any:
    """The value of a line of a file, of this kind. Raises UserError as `read`."""
    return _checked(text, kind, f"{path}, line {line}", remedy)


def check(value: Any, kind: ValueKind, where: str | Path, remedy: str) -> None:
    """Raise UserError if a value of the file `where` is not of this kind."""
    if (wrong := fault(value, kind)) is not None:
        raise UserError(f"{printable(where)} is damaged: {wrong}. {remedy}.")


def is_as_read(found: Any, value: Any) -> bool:
    """Whether `read` would return `found` for this value: the value itself, or with its text made printable."""
    return found == value or found == _shown(value)


def _checked(text: str, kind: ValueKind, where: str, remedy: str) -> Any:
    try:
        value = parse_json(text)
    except ValueError as error:
        reason = printable(error, 100).rstrip(".")
        raise UserError(f"{where} is not JSON ({reason}): it is damaged. {remedy}.") from None
    if text.count("[") + text.count("{") > DEEPEST and is_too_deep(value):  # it has too few brackets to be so deep
        raise UserError(f"{where} is nested more than {DEEPEST} deep: it is damaged. {remedy}.")
    if "\\" in text or not text.replace("\n", "").isprintable():
        value = _shown(value)
    check(value, kind, where, remedy)
    return value


def _shown(value: Any) -> Any:
    """The value with every text in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(part) for part in value]
    if isinstance(value, dict):
        return {printable(name): _shown(part) for name, part in value.items()}
    return value
