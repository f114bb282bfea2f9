"""The lessons, by number: one file each, which loads no torch, and beside it the page that a student fills."""

import importlib

from cos598d.errors import UsageError
from cos598d.tools.learn.lesson import Lesson

# A lesson is `lessonN.py` here, its page `lessonN.py.txt`, its checks, and its answer in `cos598d/tools/learn/answers`.
NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)


def get_lesson(number: int) -> Lesson:
    """The lesson of that number. Raises UsageError where there is none."""
    if number not in NUMBERS:
        raise UsageError(f"there is no lesson {number}; there are {NUMBERS[0]} to {NUMBERS[-1]}.")
    return importlib.import_module(f"cos598d.tools.learn.lessons.lesson{number}").LESSON


def all_lessons() -> list[Lesson]:
    """Every lesson, in order."""
    return [get_lesson(number) for number in NUMBERS]
