"""A TOML file that is read key by key: a value of the wrong kind, or an unknown key, is an error with its line."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError
from cos598d.records.kinds import ValueKind, fault
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 20


class TomlTable:
    """The keys of a TOML file, or of one table in it, called `within`."""

    def __init__(self, path: str, source: str, values: dict[str, Any], within: str = ""):
        self.path, self.within = path, within
        self.source, self._left = source, dict(values)

    @classmethod
    def read(cls, path: Path) -> "TomlTable":
        """The table of a file. Raises UsageError if there is no file, or if it is not TOML."""
        try:
            data = read_plain(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}). Give an assignment's TOML file.") from None
        if len(data) > MOST_BYTES:
            raise UsageError(f"{path} has more than {MOST_BYTES >> 20} MB. Give an assignment's TOML file.")
        try:
            return cls.of_text(str(path), data.decode("utf-8"))
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not UTF-8. Give an assignment's TOML file.") from None

    @classmethod
    def of_text(cls, path: str, source: str) -> "TomlTable":
        """The table of a text that came from `path`. Raises UsageError if it is not TOML."""
        try:
            return cls(path, source, tomllib.loads(source))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {printable(error, 200)}.") from None
        except RecursionError:
            raise UsageError(f"{path} is nested too deeply. Give an assignment's TOML file.") from None

    def take(self, key: str, kind: ValueKind, default: Any = None) -> Any:
        """The value of `key`, which must be of that kind; `default` if it is not given. Raises UsageError."""
        if key not in self._left:
            return default
        value = self._left.pop(key)
        try:
            wrong = fault(value, kind)
        except TypeError:  # TOML has dates, which JSON does not have
            wrong = f"it has a date or a time instead of {kind.wanted}"
        if wrong is not None:
            raise self.error(key, f"{key}: {wrong}")
        return value

    def table(self, key: str) -> "TomlTable":
        """The table called `key`; an empty one if it is missing. Raises UsageError for a value that is no table."""
        values = self._left.pop(key, {})
        if not isinstance(values, dict):
            raise self.error(key, f"{key} is not a table. Write [{self._full(key)}] and its keys below it")
        return TomlTable(self.path, self.source, values, self._full(key))

    def left(self) -> dict[str, Any]:
        """The keys that have not been read yet, with their values."""
        return dict(self._left)

    def end(self, known: Sequence[str]) -> None:
        """Raise UsageError if a key is left that is not read; `known` are the keys that would be."""
        if self._left:
            key = next(iter(self._left))
            raise self.error(key, f"unknown key {printable(key, 100)}. Use one of {', '.join(known)}")

    def error(self, key: str, words: str) -> UsageError:
        """An error at `key`, in a sentence with the file and the line."""
        line = self._line(key)
        return UsageError(f"{self.path}{f' line {line}' if line else ''}: {words.rstrip('.')}.")

    def _full(self, key: str) -> str:
        return f"{self.within}.{key}" if self.within else key

    def _line(self, key: str) -> int:
        """The line of `key`, counted from 1; 0 where it is written in an unusual way."""
        within = ""
        for number, line in enumerate(self.source.splitlines(), 1):
            if header := re.match(r"\s*\[\s*[\"']?([^\]\"']*?)[\"']?\s*\]", line):
                within = header[1]
                if within == self._full(key):
                    return number
            given = re.match(r"\s*[\"']?([^=\"']*?)[\"']?\s*=", line)
            if given and (within, given[1]) == (self.within, key):
                return number
            if given and self.within and not within and given[1] == f"{self.within}.{key}":
                return number
        return 0
