"""A class: every submission in a folder graded one after the other, with a line each on the screen and in a table."""

import csv
import io
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.errors import UsageError, UserError
from cos598d.terminal.files import write_whole
from cos598d.terminal.printable import printable
from cos598d.tools.check.card import STATUS_WIDTH
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.scored import Judged, Scored, exit_code, most, number, total
from cos598d.tools.grade.submission import Grader, SubmissionEnd

STATUS = {0: "passed", 1: "wrong", 2: "not judged"}
LONGEST = 1000  # characters of what the table says of a submission
MOST_NAMES = 20  # of what was passed over
_WRAPPED = re.compile(rf"\n {{{STATUS_WIDTH + 1},}}")  # within a sentence of `check`


@dataclass(frozen=True)
class Graded:
    """What became of a submission. `name` is that of its file or folder, in full; `seconds` is what grading it took."""

    name: str
    scored: tuple[Scored, ...]
    seconds: float
    end: SubmissionEnd

    @property
    def status(self) -> str:
        """passed, wrong, or not judged."""
        return STATUS[exit_code(self.scored)]

    @property
    def words(self) -> str:
        """Why points are missing: the end's remark, else the first lines on the first claim that does not hold."""
        first = next((each for each in self.scored if not each.passed), None)
        said = self.end.remark or (f"{first.name}: {first.words}" if first else "")
        lines = [" ".join(line.split()) for line in _WRAPPED.sub(" ", said).splitlines() if line.strip()]
        ended = [line if line[-1] in ".:;!?" else f"{line}." for line in lines[:-1]]
        return " ".join([*ended, *lines[-1:]])


def submissions_in(folder: Path) -> tuple[list[Path], list[str]]:
    """The submissions of a class, which are the folders and the Python files that lie in `folder`, and the names of all
    else in it: links, hidden files, archives, names that begin with an underscore. Raises UsageError."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror}). Give the folder of a class.") from None
    found = [
        entry
        for entry in entries
        if not entry.is_symlink() and entry.name[0] not in "._" and (entry.is_dir() or entry.suffix == ".py")
    ]
    passed_over = [entry.name for entry in entries if entry not in found]
    if not found:
        there = f"; it only has {names(passed_over)}" if passed_over else ""
        raise UsageError(f"{folder} has no submission. It must have a folder or a Python file for each{there}.")
    return found, passed_over


def names(found: Sequence[str]) -> str:
    """The first of these names, as one line, and how many more there are."""
    shown = ", ".join(printable(name, 40) for name in found[:MOST_NAMES])
    return shown + (f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else "")


def grade_class(
    submissions: Sequence[Path], grader: Grader, assignment: Assignment, table: Path, say: Callable[[Graded], None]
) -> list[Graded]:
    """Grade all submissions; after each, write the CSV `table` and call `say`. Raises UserError."""
    graded: list[Graded] = []
    for path in submissions:
        began = time.monotonic()
        judged: list[Judged] = []
        end = grader.grade(path, judged.append)
        scored = assignment.scored(judged, end.otherwise)
        graded.append(Graded(path.name, tuple(scored), time.monotonic() - began, end))
        try:
            write_whole(table, as_csv(graded, list(assignment.points)))
        except OSError as error:
            raise UserError(f"{table} cannot be written ({error.strerror}). Check its folder.") from None
        say(graded[-1])
    return graded


def as_csv(graded: Sequence[Graded], claims: Sequence[str]) -> str:
    """The table: a row a submission, a column a claim."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["submission", "score", "max_score", "status", "seconds", *claims, "words"])
    for each in graded:
        points = [number(one.points) for one in each.scored]
        about = [number(total(each.scored)), number(most(each.scored)), each.status, f"{each.seconds:.1f}"]
        rows.writerow([_cell(each.name), *about, *points, _cell(printable(each.words, LONGEST))])
    return text.getvalue()


def _cell(text: str) -> str:
    """A submission's words as a cell that no spreadsheet takes for a formula."""
    shown = printable(text, LONGEST)
    return f"'{shown}" if shown[:1] in ("=", "+", "-", "@") else shown
