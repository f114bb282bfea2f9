"""Lessons of formulas: a file's functions against the right ones, with a mistake named by the results that it gives."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from cos598d.tools.course.common import near
from cos598d.tools.exam.notes import LessonComm
from cos598d.tools.exam.ranks import World

WITHIN = 0.01
EXACTLY = 1e-5  # so near is what a mistake gives
MOST_SHOWN = 8  # of a list
Formula = Callable[..., Any]
Calls = Sequence[tuple[Any, ...]]


def call_each(comm: LessonComm, module: Any, function: str, calls: Calls) -> list[Any]:
    """On a rank: what a function of the file gives for each of these arguments, as JSON."""
    return [as_json(getattr(module, function)(*arguments)) for arguments in calls]


def as_json(value: Any) -> Any:
    """A file's result as JSON: numbers as float, in lists, dictionaries and arrays too, and None as it is."""
    if hasattr(value, "tolist"):  # of numpy or torch, where one element is a number
        value = value.item() if math.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value if value is None or isinstance(value, bool | str) else float(value)


def agree(world: World, right: Formula, calls: Calls, mistakes: Mapping[str, Formula], within: float = WITHIN) -> None:
    """Fail unless the file's function gave what `right`, which has its name, gives for each of `calls`.

    mistakes: by what is said of it, a formula that is wrong.
    """
    function, found = right.__name__, world.values[0]
    expected = [right(*arguments) for arguments in calls]
    wrong = [n for n, pair in enumerate(zip(found, expected, strict=True)) if not near(*pair, within)]
    if not wrong:
        return
    off = wrong[0]

    def why(numbers: Sequence[int], within: float) -> str:
        """What is said of the first mistake that explains the results of all these calls."""
        ways = mistakes.items()
        return next((words for words, way in ways if all(near(found[n], way(*calls[n]), within) for n in numbers)), "")

    # First a mistake that explains all results, also those that it does not spoil. Else one that explains the wrong
    # ones; where arguments are words, only those with the words of the first.
    kinds = [[each for each in arguments if isinstance(each, str)] for arguments in calls]
    words = why(range(len(found)), min(within, WITHIN))
    words = words or why([n for n in wrong if kinds[n] == kinds[off]], EXACTLY)
    digits = 4 if within >= WITHIN else 6
    names = inspect.signature(right).parameters
    given = ", ".join(f"{name}={shown(each)}" for name, each in zip(names, calls[off], strict=True))
    what = f"{function}({given}) is {shown(found[off], digits)}, expected {shown(expected[off], digits)}"
    world.fail(f"{what}: {words}" if words else what, about=function)


def is_right(
    ranks: Callable[..., World], n: int, right: ModuleType, function: str, calls: Calls, within: float = WITHIN
) -> None:
    """Fail unless the file's function gives what that of the module `right` gives, which has its MISTAKES too."""
    agree(ranks(n, call_each, function, calls), getattr(right, function), calls, right.MISTAKES[function], within)


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


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
