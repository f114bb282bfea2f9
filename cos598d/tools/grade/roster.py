"""The students of a class, from a CSV file, and which submission is whose."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain


@dataclass(frozen=True)
class Student:
    """A row of the roster; all except `id` may be empty."""

    id: str
    name: str = ""
    email: str = ""
    section: str = ""


NUMBER = re.compile(r"_\d+$")
COLUMNS = tuple(field.name for field in fields(Student))


def read_roster(path: Path) -> list[Student]:
    """The students in a CSV file whose first line names its columns: id, and name, email and section where there are.

    Raises UsageError.
    """
    form = f"Give a CSV file whose first line is {','.join(COLUMNS)}."
    try:
        text = read_plain(path).decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""), restkey="more")
        rows = list(table)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}). {form}") from None
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV file ({printable(error, 200)}). {form}") from None
    if "id" not in (table.fieldnames or ()):
        raise UsageError(f"{path} has no column id. {form}")
    students = [Student(**{name: (row.get(name) or "").strip() for name in COLUMNS}) for row in rows]
    if not students or not all(student.id for student in students):
        raise UsageError(f"{path} has {'a student without an id' if students else 'no student'}. {form}")
    seen: set[str] = set()
    for student in students:
        if student.id.casefold() in seen:
            raise UsageError(f"{path} has the id {printable(student.id, 60)} twice. Give each student a different one.")
        seen.add(student.id.casefold())
    return students


def owners(submissions: Iterable[str], students: Sequence[Student]) -> dict[str, Student]:
    """Whose each submission is: its name, without .py, is the student's id, email, or the email's part before the @.
    Platforms add numbers to an id or an email, as in ann@uni.edu_12345: they are left out if nobody has the whole name.

    Submissions of nobody are left out. Raises UsageError if one student has two.
    """
    known: dict[str, set[Student]] = {}
    for student in students:
        for word in {student.email, student.email.partition("@")[0]} - {""}:
            known.setdefault(word.casefold(), set()).add(student)
    known |= {student.id.casefold(): {student} for student in students}
    whole = {word: own for word, own in known.items() if any(word == each.id.casefold() or "@" in word for each in own)}
    found: dict[str, Student] = {}
    for name in submissions:
        word = name.removesuffix(".py").casefold()
        mine = known.get(name.casefold()) or known.get(word) or set()
        while not mine and NUMBER.search(word):
            word = NUMBER.sub("", word)
            mine = whole.get(word, set())
        if len(mine) == 1:
            (student,) = mine
            other = next((each for each, whose in found.items() if whose == student), None)
            if other is not None:
                both = f"{printable(other, 60)} and {printable(name, 60)}"
                raise UsageError(f"{both} both belong to the student {printable(student.id, 60)}. Keep one of them.")
            found[name] = student
    return found
