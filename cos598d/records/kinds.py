"""Kinds: tables of what a value from a file must be, which find the first place where it is something else."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cos598d.terminal.printable import printable

LARGEST = 1e100  # sums and squares of smaller numbers stay finite
DEEPEST = 32  # of values in values; none of our records has more than 5

_MISSING = object()
Part = tuple[str | int, Any, "ValueKind"]  # its name or index, its value, and its required kind


@dataclass(frozen=True)
class ValueKind:
    """A requirement for a value. `wanted` describes it, `fits` judges a value without its parts, and `parts` are those
    of one that fits, in the order in which they are checked."""

    wanted: str
    fits: Callable[[Any], bool]
    parts: Callable[[Any], Iterable[Part]] | None = None


def Number(  # noqa: N802 - kinds are called like types
    words: str = "a number",
    least: float = -LARGEST,
    most: float = LARGEST,
    is_whole: bool = False,
    is_above: bool = False,
) -> ValueKind:
    """A finite number, from `least` (or above it) to `most`; a whole one if asked. True and False do not count."""
    types = (int,) if is_whole else (int, float)

    def fits(value: Any) -> bool:
        is_number = isinstance(value, types) and value is not True and value is not False
        return is_number and least <= value <= most and not (is_above and value == least)

    return ValueKind(words, fits)


def Of(words: str, types: tuple[type, ...]) -> ValueKind:  # noqa: N802
    """A value of one of Python's own types."""
    return ValueKind(words, lambda value: isinstance(value, types))


def OneOf(known: tuple[str, ...]) -> ValueKind:  # noqa: N802
    """One of several strings."""
    return ValueKind(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def OrNone(kind: ValueKind) -> ValueKind:  # noqa: N802
    """Another kind, or None (null in JSON)."""
    inner = kind.parts
    parts = inner and (lambda value: () if value is None else inner(value))
    return ValueKind(f"{kind.wanted} or null", lambda value: value is None or kind.fits(value), parts)


def ListOf(kind: ValueKind, count: int | None = None, least: int = 0) -> ValueKind:  # noqa: N802
    """A list of values of one kind: exactly `count`, or at least `least`."""

    def fits(value: Any) -> bool:
        return isinstance(value, list) and (len(value) >= least if count is None else len(value) == count)

    def parts(value: list[Any]) -> Iterator[Part]:
        return zip(itertools.count(), value, itertools.repeat(kind), strict=False)

    return ValueKind(f"a list of {f'{least} or more' if count is None else count}", fits, parts)


def FixedList(kinds: tuple[ValueKind, ...]) -> ValueKind:  # noqa: N802
    """A list with a kind for each value."""

    def parts(value: list[Any]) -> Iterator[Part]:
        return zip(itertools.count(), value, kinds, strict=False)

    return ValueKind(
        f"a list of {len(kinds)}", lambda value: isinstance(value, list) and len(value) == len(kinds), parts
    )


def MapOf(kind: ValueKind, words: str = "an object", names: str | None = None) -> ValueKind:  # noqa: N802
    """An object whose values all have one kind, with any names, or with names that match `names` (a pattern)."""
    other_name = ValueKind(words, lambda _: False)

    def parts(value: dict[str, Any]) -> Iterator[Part]:
        for name, part in value.items():
            if names is not None and not re.fullmatch(names, name, re.ASCII):
                yield "", name, other_name
            yield name, part, kind

    return ValueKind(words, _is_object, parts)


def Fields(  # noqa: N802
    needed: Mapping[str, ValueKind] | None = None, optional: Mapping[str, ValueKind] | None = None, alone: bool = False
) -> ValueKind:
    """An object with these `needed` and `optional` fields. Other fields are ignored, or not allowed if `alone`."""
    musts, mays = needed or {}, optional or {}

    def parts(value: dict[str, Any]) -> Iterator[Part]:
        for name, kind in musts.items():
            yield name, value.get(name, _MISSING), kind
        for name, kind in mays.items():
            if name in value:
                yield name, value[name], kind
        if alone and (others := value.keys() - musts.keys() - mays.keys()):
            yield min(others), value[min(others)], _NOTHING

    return ValueKind("an object", _is_object, parts)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_NOTHING = ValueKind("no such field", lambda _: False)
NUMBER = Number()
NOT_NEGATIVE = Number("a number of at least 0", least=0)
POSITIVE = Number("a number above 0", least=0, is_above=True)
WHOLE = Number("a whole number", is_whole=True, least=-(2**63), most=2**64)
COUNT = Number("a whole number of at least 0", is_whole=True, least=0, most=2**63)
SIZE = Number("a whole number of at least 1", is_whole=True, least=1, most=2**63)
TEXT = Of("text", (str,))
FLAG = Of("true or false", (bool,))


def fault(value: Any, kind: ValueKind) -> str | None:
    """The first place where a value is not of this kind, as a phrase that follows its file's name; None if it fits."""
    found = _first_wrong(value, kind)
    if found is None:
        return None
    path, wrong, expected = found
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path if part != "")
    name = printable(place.removeprefix("."), 100)
    if wrong is _MISSING:
        says = f"it has no {name}"
    else:
        # The value is printable already: its escapes must not be escaped again.
        shown = printable(json.dumps(wrong, ensure_ascii=False).replace("\\\\", "\\"), 60)
        says = f"its {name} is {shown}" if name else f"it is {shown}"
    return f"{says}, where {expected.wanted} is expected"


def _first_wrong(value: Any, kind: ValueKind) -> tuple[tuple[str | int, ...], Any, ValueKind] | None:
    if value is _MISSING or not kind.fits(value):
        return (), value, kind
    for name, part, of in kind.parts(value) if kind.parts is not None else ():
        if of.parts is None and part is not _MISSING and of.fits(part):
            continue  # as most parts are
        if (found := _first_wrong(part, of)) is not None:
            return (name, *found[0]), found[1], found[2]
    return None


def expect(value: Any, kind: ValueKind) -> None:
    """Raise ValueError, with the phrase of `fault`, if a value is not of this kind."""
    if (wrong := fault(value, kind)) is not None:
        raise ValueError(wrong)


def is_too_deep(value: Any, most: int = DEEPEST) -> bool:
    """Whether its values are nested more than `most` deep."""
    if not isinstance(value, dict | list):
        return False
    return not most or any(
        is_too_deep(part, most - 1) for part in (value.values() if isinstance(value, dict) else value)
    )
