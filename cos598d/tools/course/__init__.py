"""The course: twenty lessons, each a page with blanks, an answer, and tests that say what is wrong in a file.

A lesson is a folder: `lesson.toml` has its facts, `page.py.txt` the file to fill in, `answer` one that passes (which
can be hidden from submissions), and `test_lesson.py` the tests. Loads no torch: only the tests need it.
"""

import re
import sys
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LESSONS = files(__name__).joinpath("lessons")
NUMBERS = tuple(sorted(int(each.name[6:]) for each in LESSONS.iterdir() if re.fullmatch(r"lesson\d+", each.name)))
MARKER = re.compile(rb"^# cos598d lesson (\d{1,3})\b", flags=re.MULTILINE)


@dataclass(frozen=True)
class Lesson:
    """One lesson. Its fields are those of `lesson.toml` in its folder.

    number    its place in the course, from 0
    title     what it is called
    minutes   about how long it takes somebody who has done those before
    ranks     the numbers of ranks that its tests use
    hints     what `--hint` tells, one after the other
    read      what to read in the library afterwards; measure: what to measure
    contract  what the file must define, by name, each as it is called
    """

    number: int
    title: str
    minutes: int
    ranks: tuple[int, ...]
    hints: tuple[str, ...]
    read: str
    measure: str
    contract: dict[str, str] = field(hash=False)

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
                f"cos598d/tools/course/lessons/lesson{self.number}/answer."
            ) from None

    @property
    def tests(self) -> Path:
        """The file of its tests."""
        return Path(str(LESSONS.joinpath(f"lesson{self.number}", "test_lesson.py")))

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


def all_lessons() -> list[Lesson]:
    """Every lesson, in order."""
    return [get_lesson(number) for number in NUMBERS]


def lesson_of(source: bytes) -> int | None:
    """The lesson whose marker is in a file; None without one."""
    marker = MARKER.search(source)
    return int(marker[1]) if marker else None


def _text(number: int, *path: str) -> str:
    return LESSONS.joinpath(f"lesson{number}", *path).read_text(encoding="utf-8")
