"""What a lesson is: its question, its page with blanks, its hints, and where its checks are."""

import importlib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING

from cos598d.errors import UserError

if TYPE_CHECKING:  # checks need torch, which takes seconds, and a list of lessons does not
    from cos598d.tools.learn.checking import Checks


@dataclass(frozen=True)
class Lesson:
    """One lesson. The file that a student fills is `page()`, an answer for teachers `answer()`.

    number    its place in the course, from 0
    name      a word for it; title: what it is called
    minutes   about how long it takes somebody who has done those before
    question  what is asked, in two or three sentences; the page says it at length
    contract  what the file must define, by name, each as it is called
    hints     what `--hint` tells, one after the other
    checks    the module under `cos598d.tools.learn.checks` whose CHECKS are what must hold
    read      what to read in the library afterwards; measure: what to measure
    ranks     the numbers of ranks that it is checked on, as its checks have them: said before torch is loaded
    """

    number: int
    name: str
    title: str
    minutes: int
    question: str
    contract: dict[str, str] = field(hash=False)
    hints: tuple[str, ...]
    checks: str
    read: str
    measure: str
    ranks: tuple[int, ...] = (2, 3)

    def page(self) -> str:
        """The text of the file to fill in."""
        return _text("lessons", self.number)

    def answer(self) -> str:
        """The text of a file that passes. Raises UserError where the answers are left out, as in an autograder."""
        try:
            return _text("answers", self.number)
        except FileNotFoundError:
            raise UserError(
                f"this copy of the program has no answer to lesson {self.number}: its repository has, in "
                "cos598d/tools/learn/answers."
            ) from None

    def load_checks(self) -> "Checks":
        """What must hold. Loads torch."""
        return importlib.import_module(self.checks_module).CHECKS

    @property
    def checks_module(self) -> str:
        """The module that has the checks."""
        return f"cos598d.tools.learn.checks.{self.checks}"

    @property
    def has_picture(self) -> bool:
        """Whether there is a step to be drawn: then the page says so."""
        return f"learn {self.number} --picture" in self.page()

    @property
    def file_name(self) -> str:
        """What a student's file is called unless it is called otherwise."""
        return f"lesson{self.number}.py"


def _text(folder: str, number: int) -> str:
    return (files(f"cos598d.tools.learn.{folder}") / f"lesson{number}.py.txt").read_text(encoding="utf-8")
