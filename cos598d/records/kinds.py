"""What a value from a file must be, as tables of kinds that tell the first place where it is something else."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cos598d.terminal.printable import printable

LARGEST = 1e100  # sums and squares of less stay finite
DEEPEST = 32  # of one value in another; no record of ours has more than 5


_MISSING = object()


class WrongValue(Exception):
    """A value that is not `expected`; `place` is put together while it is passed on from the inside to the outside."""

    def __init__(self, value: Any, expected: str, place: str = ""):
        self.value, self.expected, self.place = value, expected, place

    def inside(self, outer: str) -> "WrongValue":
        """The same, seen from one value further out."""
        between = "." if self.place and not self.place.startswith("[") else ""
        self.place = f"{outer}{between}{self.place}"
        return self


class ValueKind:
    """What a value must be."""

    @property
    def wanted(self) -> str:
        """What it must be, in words."""
        raise NotImplementedError

    def check(self, value: Any) -> None:
        """Raise Wrong where `value`, or a part of it, is something else."""
        if not self.fits(value):
            raise WrongValue(value, self.wanted)

    def fits(self, value: Any) -> bool:
        """Whether the value itself, without its parts, is of this kind."""
        raise NotImplementedError


class _InWords(ValueKind):
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
class OneOf(ValueKind):
    """One of some words."""

    known: tuple[str, ...]

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(self.known)}"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.known


@dataclass(frozen=True)
class OrNone(ValueKind):
    """Another kind, or None: null in JSON."""

    kind: ValueKind

    @property
    def wanted(self) -> str:
        return f"{self.kind.wanted} or null"

    def check(self, value: Any) -> None:
        if value is not None:
            if not self.kind.fits(value):
                raise WrongValue(value, self.wanted)
            self.kind.check(value)


@dataclass(frozen=True)
class ListOf(ValueKind):
    """A list of values of one kind, of `count` of them or of at least `least`."""

    kind: ValueKind
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
            except WrongValue as wrong:
                raise wrong.inside(f"[{number}]") from None


@dataclass(frozen=True)
class FixedList(ValueKind):
    """A list whose values each have a kind of their own."""

    kinds: tuple[ValueKind, ...]

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
            except WrongValue as wrong:
                raise wrong.inside(f"[{number}]") from None


@dataclass(frozen=True)
class MapOf(_InWords):
    """An object whose values are all of one kind, whatever their names, or with `names` of this form (a pattern)."""

    kind: ValueKind
    words: str = "an object"
    names: str | None = None

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def check(self, value: Any) -> None:
        super().check(value)
        for name, part in value.items():
            if self.names is not None and not re.fullmatch(self.names, name, re.ASCII):
                raise WrongValue(name, self.words)
            try:
                self.kind.check(part)
            except WrongValue as wrong:
                raise wrong.inside(name) from None


@dataclass(frozen=True)
class Fields(_InWords):
    """An object with fields of these names: `needed` ones, and `optional` ones. What else it has is not looked at,
    unless it must have these `alone`."""

    needed: Mapping[str, ValueKind] = field(default_factory=dict)
    optional: Mapping[str, ValueKind] = field(default_factory=dict)
    words: str = "an object"
    alone: bool = False

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def check(self, value: Any) -> None:
        super().check(value)
        name = ""
        try:
            for name, kind in self.needed.items():
                if name not in value:
                    raise WrongValue(_MISSING, kind.wanted)
                kind.check(value[name])
            for name, kind in self.optional.items():
                if name in value:
                    kind.check(value[name])
        except WrongValue as wrong:
            raise wrong.inside(name) from None
        if self.alone and (others := value.keys() - self.needed.keys() - self.optional.keys()):
            raise WrongValue(value[min(others)], "no such field", min(others))


NUMBER = Number()
NOT_NEGATIVE = Number("a number of at least 0", least=0)
POSITIVE = Number("a number above 0", least=0, is_above=True)
WHOLE = Number("a whole number", is_whole=True, least=-(2**63), most=2**64)
COUNT = Number("a whole number of at least 0", is_whole=True, least=0, most=2**63)
SIZE = Number("a whole number of at least 1", is_whole=True, least=1, most=2**63)
TEXT = Of("text", (str,))
FLAG = Of("true or false", (bool,))


def fault(value: Any, kind: ValueKind) -> str | None:
    """Where a value is not of this kind, in words that follow the name of its file; None where it is."""
    try:
        kind.check(value)
    except WrongValue as wrong:
        name = printable(wrong.place, 100)
        if wrong.value is _MISSING:
            says = f"it has no {name}"
        else:
            # What is read is printable already: its escapes are not to be escaped again.
            shown = printable(json.dumps(wrong.value, ensure_ascii=False).replace("\\\\", "\\"), 60)
            says = f"its {name} is {shown}" if name else f"it is {shown}"
        return f"{says}, where {wrong.expected} is expected"
    return None


def expect(value: Any, kind: ValueKind) -> None:
    """Raise ValueError, with `fault`'s words, where a value is not of this kind."""
    if (wrong := fault(value, kind)) is not None:
        raise ValueError(wrong)


def is_too_deep(value: Any, most: int = DEEPEST) -> bool:
    """Whether values in it are nested more than `most` deep."""
    if not isinstance(value, dict | list):
        return False
    return not most or any(
        is_too_deep(part, most - 1) for part in (value.values() if isinstance(value, dict) else value)
    )
