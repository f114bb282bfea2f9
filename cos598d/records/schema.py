"""What a value from a file must be, as tables of kinds: the first place where it is not is told by file and field."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.files import parse_json
from cos598d.terminal.printable import printable

LARGEST = 1e100  # sums and squares of less stay finite
DEEPEST = 32  # of one value in another; no record of ours has more than 5


_MISSING = object()


class _Wrong(Exception):
    """A value that is not `expected`; `place` is put together while it is passed on from the inside to the outside."""

    def __init__(self, value: Any, expected: str, place: str = ""):
        self.value, self.expected, self.place = value, expected, place

    def inside(self, outer: str) -> "_Wrong":
        """The same, seen from one value further out."""
        between = "." if self.place and not self.place.startswith("[") else ""
        self.place = f"{outer}{between}{self.place}"
        return self


class Kind:
    """What a value must be."""

    @property
    def wanted(self) -> str:
        """What it must be, in words."""
        raise NotImplementedError

    def check(self, value: Any) -> None:
        """Raise _Wrong where `value`, or a part of it, is something else."""
        if not self.fits(value):
            raise _Wrong(value, self.wanted)

    def fits(self, value: Any) -> bool:
        """Whether the value itself, without its parts, is of this kind."""
        raise NotImplementedError


class _InWords(Kind):
    """A kind that says in `words` what a value must be."""

    words: str

    @property
    def wanted(self) -> str:
        return self.words


@dataclass(frozen=True)
class Number(_InWords):
    """A finite number, from `least` (or above it) to `most`; a whole one where asked. True and False are none."""

    words: str = "a number"
    least: float = -LARGEST
    most: float = LARGEST
    is_whole: bool = False
    is_above: bool = False

    def fits(self, value: Any) -> bool:
        kinds = int if self.is_whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and self.least <= value <= self.most and not (self.is_above and value == self.least)


@dataclass(frozen=True)
class Of(_InWords):
    """A value of one of Python's own types."""

    words: str
    types: tuple[type, ...]

    def fits(self, value: Any) -> bool:
        return isinstance(value, self.types)


@dataclass(frozen=True)
class OneOf(Kind):
    """One of some words."""

    known: tuple[str, ...]

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(self.known)}"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.known


@dataclass(frozen=True)
class OrNone(Kind):
    """Another kind, or None: null in JSON."""

    kind: Kind

    @property
    def wanted(self) -> str:
        return f"{self.kind.wanted} or null"

    def check(self, value: Any) -> None:
        if value is not None:
            if not self.kind.fits(value):
                raise _Wrong(value, self.wanted)
            self.kind.check(value)


@dataclass(frozen=True)
class ListOf(Kind):
    """A list of values of one kind, of `count` of them or of at least `least`."""

    kind: Kind
    count: int | None = None
    least: int = 0

    @property
    def wanted(self) -> str:
        return f"a list of {self.count if self.count is not None else f'{self.least} or more'}"

    def fits(self, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        return len(value) == self.count if self.count is not None else len(value) >= self.least

    def check(self, value: Any) -> None:
        super().check(value)
        for number, part in enumerate(value):
            try:
                self.kind.check(part)
            except _Wrong as wrong:
                raise wrong.inside(f"[{number}]") from None


@dataclass(frozen=True)
class Row(Kind):
    """A list whose values each have a kind of their own."""

    kinds: tuple[Kind, ...]

    @property
    def wanted(self) -> str:
        return f"a list of {len(self.kinds)}"

    def fits(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) == len(self.kinds)

    def check(self, value: Any) -> None:
        super().check(value)
        for number, (kind, part) in enumerate(zip(self.kinds, value, strict=True)):
            try:
                kind.check(part)
            except _Wrong as wrong:
                raise wrong.inside(f"[{number}]") from None


@dataclass(frozen=True)
class MapOf(_InWords):
    """An object whose values are all of one kind, whatever their names."""

    kind: Kind
    words: str = "an object"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def check(self, value: Any) -> None:
        super().check(value)
        for name, part in value.items():
            try:
                self.kind.check(part)
            except _Wrong as wrong:
                raise wrong.inside(name) from None


@dataclass(frozen=True)
class Fields(_InWords):
    """An object with fields of these names: `needed` ones, and `optional` ones. What else it has is not looked at."""

    needed: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    words: str = "an object"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def check(self, value: Any) -> None:
        super().check(value)
        name = ""
        try:
            for name, kind in self.needed.items():
                if name not in value:
                    raise _Wrong(_MISSING, kind.wanted)
                kind.check(value[name])
            for name, kind in self.optional.items():
                if name in value:
                    kind.check(value[name])
        except _Wrong as wrong:
            raise wrong.inside(name) from None


NUMBER = Number()
NOT_NEGATIVE = Number("a number of at least 0", least=0)
POSITIVE = Number("a number above 0", least=0, is_above=True)
WHOLE = Number("a whole number", is_whole=True, least=-(2**63), most=2**64)
COUNT = Number("a whole number of at least 0", is_whole=True, least=0, most=2**63)
SIZE = Number("a whole number of at least 1", is_whole=True, least=1, most=2**63)
TEXT = Of("text", (str,))
FLAG = Of("true or false", (bool,))


def read(path: Path, kind: Kind, remedy: str) -> Any:
    """The value of a JSON file, of this kind. Raises OSError as `open`, and UserError for a file that is damaged.

    Text in it is made printable: what no terminal and no page should get does not get further than here.
    """
    try:
        return _checked(path.read_text(encoding="utf-8"), kind, str(path), remedy)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not JSON, for it is no UTF-8: it is damaged, {remedy}.") from None


def read_rows(path: Path, kind: Kind, remedy: str, grows: bool = False) -> Iterator[Any]:
    """The values of a JSON-lines file, one by one, each of this kind. Raises as `read`.

    Of a file that `grows`, or whose writer was killed, the last row may be there in part: that is left out.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
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
    try:
        kind.check(value)
    except _Wrong as wrong:
        name = printable(wrong.place, 100)
        if wrong.value is _MISSING:
            says = f"it has no {name}"
        else:
            # What is read is printable already: its escapes are not to be escaped again.
            shown = printable(json.dumps(wrong.value, ensure_ascii=False).replace("\\\\", "\\"), 60)
            says = f"its {name} is {shown}" if name else f"it is {shown}"
        raise UserError(
            f"{printable(where)} is damaged: {says}, where {wrong.expected} is expected; {remedy}."
        ) from None


def _checked(text: str, kind: Kind, where: str, remedy: str) -> Any:
    try:
        value = parse_json(text)
    except ValueError as error:
        reason = printable(error, 100).rstrip(".")
        raise UserError(f"{where} is not JSON ({reason}): it is damaged, {remedy}.") from None
    if text.count("[") + text.count("{") > DEEPEST:  # else it cannot be so deep
        try:
            _measure(value, DEEPEST)
        except RecursionError:
            raise UserError(f"{where} is nested more than {DEEPEST} deep: it is damaged, {remedy}.") from None
    if "\\" in text or not text.replace("\n", "").isprintable():
        value = _shown(value)
    check(value, kind, where, remedy)
    return value


def _measure(value: Any, left: int) -> None:
    """Raise RecursionError where a value is nested deeper than `left`."""
    if isinstance(value, dict | list):
        if not left:
            raise RecursionError
        for part in value.values() if isinstance(value, dict) else value:
            _measure(part, left - 1)


def _shown(value: Any) -> Any:
    """The value with every text in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(part) for part in value]
    if isinstance(value, dict):
        return {printable(name): _shown(part) for name, part in value.items()}
    return value
