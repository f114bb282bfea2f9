"""Dataclass fields that are also flags: meaning, accepted values and default are written once, next to the field."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType
from typing import Any, get_args

from cos598d.errors import UsageError

LARGEST = 1 << 63  # whole numbers must be smaller: torch takes no larger ones as a seed or a size


@dataclass(frozen=True)
class Flag:
    """The command-line flag of a field.

    words       the flag's meaning, for --help; "{choices}" is replaced by the choices
    group       its heading in --help
    choices     the accepted words; None: any
    least       the smallest number accepted; `above`: numbers must be larger; `below`: numbers must be smaller
    metavar     the name of its value in --help; "": by the field's type
    none        the word that gives the field the value None
    is_local    whether the ranks of one run may have different values
    kind        the field's type, without None
    default     the field's default
    """

    words: str
    group: str = ""
    choices: tuple[str, ...] | None = None
    least: float | None = None
    above: float | None = None
    below: float = math.inf
    metavar: str = ""
    none: str | None = None
    is_local: bool = False
    kind: type = str
    default: Any = None

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError if the flag `name` cannot have this value. None, for "not given", always passes."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            from cos598d.terminal.words import did_you_mean  # which only a wrong word needs

            near = did_you_mean(str(value), self.choices)
            raise UsageError(f"unknown --{name} {value}.{near} Choose one of {', '.join(self.choices)}.")
        if isinstance(value, (int, float)) and not self._contains(value):
            shown = value if isinstance(value, int) else f"{value:g}"
            raise UsageError(f"--{name} {shown} is not valid. Give {self._wanted()}.")

    def _contains(self, value: float) -> bool:
        is_enough = (self.least is None or self.least <= value) and (self.above is None or self.above < value)
        is_whole = isinstance(value, int)
        return is_enough and value < self.below and (abs(value) < LARGEST if is_whole else math.isfinite(value))

    def _wanted(self) -> str:
        """ "a number above 0 and below 1"."""
        least = [f"of at least {self.least:g}"] if self.least is not None else []
        above = [f"above {self.above:g}"] if self.above is not None else []
        below = [f"below {self.below:,}"] if self.below < math.inf else ["below 2^63"] if self.kind is int else []
        return f"a number {' and '.join(least + above + below)}".strip()


def flag(default: Any, words: str, **says: Any) -> Any:
    """A dataclass field with this default that is also a flag. `says` are further fields of Flag."""
    return field(default=default, metadata={"flag": Flag(words, default=default, **says)})


def flag_like(kind: type, name: str) -> Any:
    """A field that is the same flag, with the same default, as the field `name` of the dataclass `kind`."""
    said = flags_of(kind)[name]
    return field(default=said.default, metadata={"flag": said})


def flags_of(kind: type) -> dict[str, Flag]:
    """The flags among the fields of a dataclass by name: its own first, then those that it inherits."""
    known = {one.name: one for one in fields(kind)}
    order = dict.fromkeys(name for owner in kind.__mro__ for name in owner.__dict__.get("__annotations__", {}))
    found = {}
    for name in order:
        said = known[name].metadata.get("flag") if name in known else None
        if said is not None:
            found[name] = replace(said, kind=_without_none(known[name].type))
    return found


def check_flags(values: Any) -> None:
    """Raise UsageError for the first field of the dataclass `values` whose flag cannot have its value."""
    for name, said in flags_of(type(values)).items():
        said.check(name, getattr(values, name))


def given(values: Any, names: Any) -> list[str]:
    """The fields among `names` whose value in the dataclass `values` is not their default."""
    defaults = defaults_of(type(values))
    return [name for name in names if getattr(values, name) != defaults[name]]


def defaults_of(kind: type) -> Mapping[str, Any]:
    """The defaults of a dataclass's fields, by name."""
    return {one.name: one.default for one in fields(kind) if one.default is not MISSING}


def _without_none(kind: Any) -> type:
    return next((one for one in get_args(kind) if one is not NoneType), kind)
