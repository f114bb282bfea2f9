"""What lessons of formulas share: a file's functions against the right ones, with a mistake named by its results.

The right formulas and those of mistakes are a module that only the judge loads: no rank has it in memory.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import OnLesson

WITHIN = 0.01

Settings = Callable[[str, int], list[tuple[Any, ...]]]


def right_of(lesson: int) -> ModuleType:
    """The right formulas of a lesson, and `MISTAKES`: by function, what is said of the results of a mistake."""
    return importlib.import_module(f"cos598d.tools.learn.lessons.lesson{lesson}.right")


def formula_claim(lesson: int, settings: Settings, function: str, claim_name: str, says: str) -> Claim:
    """A claim that `function` of a file gives what the right formula of that name gives.

    `settings(function, nonce)` are the arguments of the calls, drawn again each time.
    """

    def observe(on: OnLesson) -> None:
        call = getattr(on.student, function)
        on.report("found", [as_json(call(*arguments)) for arguments in settings(function, on.nonce)])

    observe.__name__, observe.__doc__ = claim_name, says
    claim = Claim(observe)

    @claim.judgement
    def _(world: World) -> None:
        given_arguments = settings(function, world.nonce)
        found = world.reported("found", list)[0]
        right = right_of(lesson)
        formula, mistakes = getattr(right, function), right.MISTAKES[function]
        expected = [formula(*each) for each in given_arguments]
        off = [n for n, pair in enumerate(zip(found, expected, strict=True)) if not is_near(*pair)]
        if not off:
            return
        # A mistake is named if it explains all results, also those that it does not spoil.
        pairs = list(zip(found, given_arguments, strict=True))
        why = next((words for words, made in mistakes.items() if all(is_near(one, made(*of)) for one, of in pairs)), "")
        number = off[0]
        call = f"{function}({', '.join(shown(each) for each in given_arguments[number])})"
        words = f"{call} is {shown(found[number])}, expected {shown(expected[number])}"
        world.require(False, f"{words}: {why}" if why else words + same_factor(found, expected))

    return claim


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def as_json(value: Any) -> Any:
    """A file's result as JSON: numbers as float, in lists, dictionaries and arrays too, and None as it is."""
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value if value is None or isinstance(value, bool | str) else float(value)


def is_near(found: Any, expected: Any, within: float = WITHIN) -> bool:
    """Whether numbers, or lists and dictionaries of them, are equal up to that share."""
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
    return is_number(found) and abs(found - expected) <= within * abs(expected)


def same_factor(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """By which factor all results are off, if it is one, in words."""
    if not all(map(is_number, [*found, *expected])) or not all(found):
        return ""
    factors = [one / other for one, other in zip(found, expected, strict=True)]
    if max(factors) - min(factors) > WITHIN * abs(factors[0]):
        return ""
    return f", and all others are {factors[0]:.3g} times what they should be too"


def shown(value: Any) -> str:
    """A number in four digits, lists and dictionaries of them in brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if is_number(value) and not isinstance(value, bool) else repr(value)
