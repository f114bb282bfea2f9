"""Reading JSON files of a record, held to kinds: the first place where one is damaged is told by file and field."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cos598d.errors import UserError
from cos598d.files import parse_json
from cos598d.records.kinds import DEEPEST, Kind, fault, is_too_deep
from cos598d.terminal.printable import printable


def open_plain(path: Path, mode: str = "r") -> IO[Any]:
    """The file, opened as UTF-8 text or ("rb") bytes. Raises OSError, also for a pipe: to read it is to wait."""
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
    return open(path, mode, encoding=encoding, newline=newline, opener=_plain)


def _plain(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    found = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(found) and not stat.S_ISDIR(found):  # a folder is refused by whoever opens it as a file
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return descriptor


def read(path: Path, kind: Kind, remedy: str) -> Any:
    """The value of a JSON file, of this kind. Raises OSError as `open`, and UserError for a file that is damaged.

    Text in it is made printable: what no terminal and no page should get does not get further than here.
    """
    try:
        with open_plain(path) as file:
            return _checked(file.read(), kind, str(path), remedy)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not JSON, for it is no UTF-8: it is damaged, {remedy}.") from None


def read_rows(path: Path, kind: Kind, remedy: str, grows: bool = False) -> Iterator[Any]:
    """The values of a JSON-lines file, one by one, each of this kind. Raises as `read`.

    Of a file that `grows`, or whose writer was killed, the last row may be there in part: that is left out.
    """
    try:
        with open_plain(path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith("\n"):
                    if grows:
                        return
                    raise not_whole(path, number, remedy)
                yield parse_row(line, kind, path, remedy, number)
    except UnicodeDecodeError:
        raise UserError(f"{path} is no UTF-8 text: it is damaged, {remedy}.") from None


def not_whole(path: Path, line: int, remedy: str) -> UserError:
    """What to say of a last line that does not end."""
    return UserError(f"{path}, line {line} is not a whole JSON row: it is damaged, {remedy}.")


def parse_row(text: str, kind: Kind, path: Path, remedy: str, line: int) -> Any:
    """The value of a line of a file, of this kind. Raises UserError as `read`."""
    return _checked(text, kind, f"{path}, line {line}", remedy)


def check(value: Any, kind: Kind, where: str | Path, remedy: str) -> None:
    """Raise UserError where a value of the file `where` is not of this kind."""
    if (wrong := fault(value, kind)) is not None:
        raise UserError(f"{printable(where)} is damaged: {wrong}; {remedy}.")


def is_as_read(found: Any, value: Any) -> bool:
    """Whether `read` has found this value: itself, or what becomes of it when its text is made printable."""
    return found == value or found == _shown(value)


def _checked(text: str, kind: Kind, where: str, remedy: str) -> Any:
    try:
        value = parse_json(text)
    except ValueError as error:
        reason = printable(error, 100).rstrip(".")
        raise UserError(f"{where} is not JSON ({reason}): it is damaged, {remedy}.") from None
    if text.count("[") + text.count("{") > DEEPEST and is_too_deep(value):  # with fewer it cannot be so deep
        raise UserError(f"{where} is nested more than {DEEPEST} deep: it is damaged, {remedy}.")
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
