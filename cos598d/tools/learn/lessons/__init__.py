"""The lessons, by number: a folder each, with its facts, the page that a student fills, its checks and its answer.

Loads no torch, which takes seconds: only a lesson's `checks.py` needs it. An answer is in a folder of its own, which
can be hidden from submissions.
"""

import importlib
import re
import sys
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from cos598d.errors import UsageError, UserError
from cos598d.terminal.words import listed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from cos598d.tools.learn.checking import Checks

NUMBERS = tuple(
    sorted(int(each.name[6:]) for each in files(__name__).iterdir() if re.fullmatch(r"lesson\d+", each.name))
)


@dataclass(frozen=True)
class Lesson:
    """One lesson. Its fields are those of `lesson.toml` in its folder.

    number    its place in the course, from 0
    title     what it is called
    minutes   about how long it takes somebody who has done those before
    ranks     the numbers of ranks that it is checked on, as its checks have them
    hints     what `--hint` tells, one after the other
    read      what to read in the library afterwards; measure: what to measure
    contract  what the file must define, by name, each as it is called
    closed    modules of this library that a file may not import, because they compute what is asked
    curves    whether its picture shows curves of one rank's step, and no lanes
    golf      whether it has a board, as its checks have it
    """

    number: int
    title: str
    minutes: int
    ranks: tuple[int, ...]
    hints: tuple[str, ...]
    read: str
    measure: str
    contract: dict[str, str] = field(hash=False)
    closed: tuple[str, ...] = ()
    curves: bool = False
    golf: bool = False

    def page(self) -> str:
        """The text of the file to fill in."""
        return _text(self.number, "page.py.txt")

    @property
    def question(self) -> str:
        """What is asked, in two or three sentences: the first paragraph of the page, after its title."""
        paragraph = self.page().split("\n#\n")[1]
        return " ".join(line.removeprefix("#").strip() for line in paragraph.splitlines())

    def answer(self) -> str:
        """The text of a file that passes. Raises UserError where the answers are left out, as in an autograder."""
        try:
            return _text(self.number, "answer", self.file_name + ".txt")
        except FileNotFoundError:
            raise UserError(
                f"this copy of the program has no answer to lesson {self.number}: its repository has, in "
                f"cos598d/tools/learn/lessons/lesson{self.number}/answer."
            ) from None

    def load_checks(self) -> "Checks":
        """What must hold. Loads torch."""
        return importlib.import_module(self.checks_module).CHECKS

    @property
    def checks_module(self) -> str:
        """The module that has the checks."""
        return f"{__name__}.lesson{self.number}.checks"

    @property
    def has_picture(self) -> bool:
        """Whether there is a step to be drawn: then the page says so."""
        return f"learn {self.number} --picture" in self.page()

    @property
    def file_name(self) -> str:
        """What a student's file is called unless it is called otherwise."""
        return f"lesson{self.number}.py"


def get_lesson(number: int) -> Lesson:
    """The lesson of that number. Raises UsageError where there is none."""
    if number not in NUMBERS:
        raise UsageError(f"there is no lesson {number}. Give a number from {NUMBERS[0]} to {NUMBERS[-1]}.")
    facts: dict[str, Any] = tomllib.loads(_text(number, "lesson.toml"))
    facts = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}
    return Lesson(number, **facts)


def check_golf(lesson: Lesson, flag: str = "--golf") -> None:
    """Raise UsageError for a lesson without a board."""
    if not lesson.golf:
        known = listed([each.number for each in all_lessons() if each.golf])
        raise UsageError(f"{flag}: lesson {lesson.number} has no board. Lessons {known} have one.")


def all_lessons() -> list[Lesson]:
    """Every lesson, in order."""
    return [get_lesson(number) for number in NUMBERS]


def _text(number: int, *path: str) -> str:
    return files(__name__).joinpath(f"lesson{number}", *path).read_text(encoding="utf-8")
