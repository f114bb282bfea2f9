"""What lessons of formulas share: a file's functions against the right ones, with a mistake named by its results.

The right formulas and those of mistakes are a module that only the judge loads: no rank has it in memory.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import Check, OnLesson

WITHIN = 0.01
MOST_SHOWN = 8  # of a list
EXACTLY = 1e-5  # so near is what a mistake gives

Settings = Callable[[str, int], list[tuple[Any, ...]]]


def right_of(lesson: int) -> ModuleType:
    """The right formulas of a lesson, and `MISTAKES`: by function, what is said of the results of a mistake."""
    return importlib.import_module(f"cos598d.tools.learn.lessons.lesson{lesson}.right")


def formula_check(
    lesson: int, settings: Settings, function: str, name: str, says: str, within: float = WITHIN, ranks: int = 1
) -> Check:
    """A check, called `name`, that `function` of a file gives what the right formula of that name gives.

    `settings(function, nonce)` are the arguments of the calls, drawn again each time.
    """

    def observe(on: OnLesson) -> None:
        call = getattr(on.student, function)
        on.report("found", [as_json(call(*arguments)) for arguments in settings(function, on.nonce)])

    observe.__name__, observe.__doc__ = name, says
    claim = Claim(observe)

    @claim.judgement
    def _(world: World) -> None:
        given, found = settings(function, world.nonce), world.reported("found", list)[0]
        right = right_of(lesson)
        expected = [getattr(right, function)(*each) for each in given]
        wrong = [n for n, pair in enumerate(zip(found, expected, strict=True)) if not is_near(*pair, within)]
        if not wrong:
            return
        off = wrong[0]

        def why(calls: Sequence[int], within: float) -> str:
            """What is said of the first mistake that explains the results of all these calls."""
            ways = right.MISTAKES[function].items()
            return next((w for w, made in ways if all(is_near(found[n], made(*given[n]), within) for n in calls)), "")

        # First a mistake that explains all results, also those that it does not spoil. Else one that explains the wrong
        # ones, where arguments are words only those with the words of the first.
        kinds = [[each for each in arguments if isinstance(each, str)] for arguments in given]
        words = why(range(len(found)), min(within, WITHIN))
        words = words or why([n for n in wrong if kinds[n] == kinds[off]], EXACTLY)
        digits = 4 if within >= WITHIN else 6
        names = inspect.signature(getattr(right, function)).parameters
        call = ", ".join(f"{name}={shown(each)}" for name, each in zip(names, given[off], strict=True))
        what = f"{function}({call}) is {shown(found[off], digits)}, expected {shown(expected[off], digits)}"
        world.find(0, f"{what}: {words}" if words else what + same_factor(found, expected))

    return Check(claim, (ranks,), about=function)


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def as_json(value: Any) -> Any:
    """A file's result as JSON: numbers as float, in lists, dictionaries and arrays too, and None as it is."""
    if hasattr(value, "tolist"):  # of numpy or torch, where one element is a number
        value = value.item() if math.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value if value is None or isinstance(value, bool | str) else float(value)


def is_near(found: Any, expected: Any, within: float = WITHIN) -> bool:
    """Whether numbers, or lists and dictionaries of them, are equal up to that share; or both are None."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(is_near(found[key], each, within) for key, each in expected.items())
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(is_near(one, other, within) for one, other in zip(found, expected, strict=True))
        )
    if expected is None or found is None:
        return found is expected
    return is_number(found) and abs(found - expected) <= within * abs(expected)


def same_factor(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """By which factor all results are off, if it is one, in words."""
    if not all(map(is_number, [*found, *expected])) or not all(found):
        return ""
    factors = [one / other for one, other in zip(found, expected, strict=True)]
    if max(factors) - min(factors) > WITHIN * abs(factors[0]):
        return ""
    return f", and all others are {factors[0]:.3g} times what they should be too"


def shown(value: Any, digits: int = 4) -> str:
    """A number in that many digits, small whole ones in all; of lists and dictionaries of them the first few."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each, digits)}" for key, each in value.items())
    if isinstance(value, tuple):
        return f"({', '.join(shown(each, digits) for each in value)})"
    if isinstance(value, list):
        more = f", ... ({len(value)} in all)" if len(value) > MOST_SHOWN else ""
        return f"[{', '.join(shown(each, digits) for each in value[: 2 if more else None])}{more}]"
    if not is_number(value):
        return repr(value)
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e8 else f"{value:.{digits}g}"
