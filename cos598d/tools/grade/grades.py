"""The table of a class: a row for each student. Rows of others stay, and another class's table is not changed."""

import contextlib
import csv
import hashlib
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from cos598d.errors import UsageError, UserError
from cos598d.terminal.files import own_folder, write_whole
from cos598d.terminal.locks import locked
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import parse_json, read_plain
from cos598d.tools.check.card import STATUS_WIDTH
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.handed_in import HandedIn, Student
from cos598d.tools.grade.scored import Judged, Scored, exit_code, hint_lines, most, number, total
from cos598d.tools.grade.submission import SubmissionEnd

RESULTS = ".results"  # after the name of a table: the folder of the results that it is made of
STATUS = {0: "passed", 1: "wrong", 2: "not judged"}
MISSING = "missing"
LONGEST = 1000  # characters of what the table says of a submission in one cell
LONGEST_TEST = 500  # of what it says of one test
LONGEST_CELL = 30_000  # which every spreadsheet takes
BEFORE = ("submission", "id", "name", "email", "section", "score", "max_score", "status", "seconds")
AFTER = ("words", "failures", "submitted", "days_late", "late_points", "commit", "graded", "assignment")
BOARD = (
    *("submission", "id", "name", "section", "bytes", "times_the_limit", "times_the_answer"),
    *("seconds", "least", "most", "answer_seconds", "busy", "measured"),
)
REFERENCE = "(the answer)"
_WRAPPED = re.compile(rf"\n {{{STATUS_WIDTH + 1},}}")  # within a sentence of `check`


@dataclass(frozen=True)
class Result:
    """The result of the submission `name`. `files` and `assignment` are digests of what was judged ("": unknown) and by
    which assignment; `seconds` is how long it took, and `graded` the time, as UTC."""

    name: str
    files: str
    assignment: str
    judged: tuple[Judged, ...]
    end: SubmissionEnd
    seconds: float
    graded: str


class KeptResults:
    """The results of a table, in the folder next to it, which the first one makes."""

    def __init__(self, table: Path):
        self._table, self._folder = table, table.with_name(table.name + RESULTS)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other graders from this table within the block. Raises UsageError if one is using it."""
        with self._writing():
            own_folder(self._folder)
        with locked(self._folder) as is_ours:
            if not is_ours:
                raise UsageError(f"another grader is using {self._table}. Wait, or give --csv another file.")
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # not if there are results
                    self._folder.rmdir()

    def get(self, name: str, assignment: str) -> Result | None:
        """The newest result of this submission by this assignment; None without one."""
        try:
            data = read_plain(self._path(name), follows=False)
            found = msgspec.convert(parse_json(data.decode()), Result)
        except (OSError, ValueError):
            return None
        return found if (found.name, found.assignment) == (name, assignment) else None

    def keep(self, result: Result) -> None:
        """Write it, complete or not at all. Raises UserError."""
        with self._writing():
            own_folder(self._folder)
            write_whole(self._path(result.name), json.dumps(asdict(result)))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written ({error.strerror}). Check its folder.") from None

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:20]}.json"


@dataclass(frozen=True)
class Graded:
    """A submission's result by the points, the deadline and the roster of today. `late_points` are taken off."""

    result: Result
    scored: tuple[Scored, ...]
    handed_in: HandedIn
    student: Student | None = None
    days_late: int = 0
    late_points: float = 0.0

    @classmethod
    def of(cls, result: Result, assignment: Assignment, handed_in: HandedIn, student: Student | None) -> "Graded":
        """The grade of a result."""
        scored = tuple(assignment.scored(result.judged, result.end.otherwise))
        days = assignment.late.days(handed_in) if assignment.late else 0
        cost = min(days * assignment.late.points_per_day, total(scored)) if assignment.late else 0.0
        return cls(result, scored, handed_in, student, days, cost)

    @property
    def points(self) -> float:
        """The points of its tests, less those for lateness."""
        return total(self.scored) - self.late_points

    @property
    def status(self) -> str:
        """passed, wrong, or not judged."""
        return STATUS[exit_code(self.scored)]

    @property
    def words(self) -> str:
        """Why points are missing: the remark on its end, else the first lines on the first test that it fails."""
        said = self.result.end.remark or next(iter(self.missed), "")
        lines = [" ".join(line.split()) for line in _WRAPPED.sub(" ", said).splitlines() if line.strip()]
        ended = [line if line[-1] in ".:;!?" else f"{line}." for line in lines[:-1]]
        return " ".join([*ended, *lines[-1:]])

    @property
    def missed(self) -> list[str]:
        """Each test that it fails, and why; and what it misses of the points for hints."""
        failed = [each for each in self.scored if not each.passed and not each.is_of_hint]
        return [*(f"{each.name}: {each.words}" for each in failed), *hint_lines(self.scored, is_missed=True)]

    def row(self, assignment: Assignment) -> dict[str, str]:
        """Its row of the table, before the texts become cells."""
        late = assignment.late
        time = self.handed_in.time(late.times if late else "file")
        failed = [printable(" ".join(each.split()), LONGEST_TEST) for each in self.missed]
        return _of_student(self.result.name, self.student) | {
            "score": number(self.points),
            "max_score": number(most(self.scored)),
            "status": self.status,
            "seconds": f"{self.result.seconds:.1f}",
            **{each.name: number(each.points) for each in self.scored},
            "words": printable(self.words, LONGEST),
            "failures": " | ".join(failed),
            "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ") if time else "",
            "days_late": str(self.days_late),
            "late_points": number(self.late_points),
            "commit": self.handed_in.commit,
            "graded": self.result.graded,
            "assignment": assignment.version,
        }


class GradesTable:
    """The table in a file, whose older rows are kept. `ours` are the names of this class's submissions and students.

    Raises UsageError for a file that is no table of this assignment and class.
    """

    def __init__(self, path: Path, assignment: Assignment, ours: Collection[str]):
        self._path, self._assignment = path, assignment
        self._columns = [*BEFORE, *assignment.points, *AFTER]
        self._rows: dict[str, Mapping[str, str]] = {}
        if not path.exists():
            return
        try:
            text = read_plain(path).decode("utf-8-sig")  # a spreadsheet may have saved it
            rows = csv.DictReader(io.StringIO(text, newline=""), restkey="more", restval="")
            if list(rows.fieldnames or ()) != self._columns:
                raise UsageError(
                    f"{path} has other columns than this assignment's table. Give --csv a new file, or delete this one."
                )
            self._rows = {_key(row): row for row in rows}
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}). Give --csv a new file.") from None
        except (ValueError, csv.Error):
            raise UsageError(f"{path} is no CSV file in UTF-8. Give --csv a new file, or delete this one.") from None
        there = {row[name] for row in self._rows.values() for name in ("id", "submission")}
        if self._rows and not there & set(map(_cell, ours)):
            raise UsageError(
                f"{path} is the table of another class: nobody of this one is in it. Give --csv a new file."
            )

    def put(self, graded: Graded) -> None:
        """Put this row in, instead of the student's older one."""
        self._put(graded.row(self._assignment))

    def add_missing(self, students: Sequence[Student]) -> None:
        """Put in a row of 0 points for each of these students without a row."""
        for student in students:
            if self._rows.get(_cell(student.id), {}).get("status", MISSING) == MISSING:
                most_points = number(sum(self._assignment.points.values()))
                about = {"score": "0", "max_score": most_points, "status": MISSING}
                self._put(_of_student("", student) | about | {"assignment": self._assignment.version})

    def write(self) -> None:
        """Write it, complete or not at all. Raises UserError."""
        text = io.StringIO()
        rows = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore", lineterminator="\n")
        rows.writeheader()
        rows.writerows(row for _, row in sorted(self._rows.items()))
        _write(self._path, text.getvalue())

    def _put(self, row: Mapping[str, str]) -> None:
        cells = {name: _cell(text) for name, text in row.items()}
        if name := cells["submission"]:
            # One of two rows has no id where the student was not in the roster, or there was none.
            older = [key for key, row in self._rows.items() if row["submission"] == name]
            for key in older:
                if not cells.get("id") or not self._rows[key].get("id"):
                    del self._rows[key]
        self._rows[_key(cells)] = cells


def write_board(path: Path, graded: Collection[Graded], least: int) -> int:
    """Write the board of these submissions that pass and were measured, by bytes and then by how many times the seconds
    are the answer's, with a row of the answer; how many submissions are on it. Raises UserError."""
    rows = []
    found = [(each, golf) for each in graded if (golf := each.result.end.golf)]
    for each, (own, answer) in found:
        cells = {name: f"{getattr(own, name):.4g}" for name in ("seconds", "least", "most")}
        cells |= {"answer_seconds": f"{answer.seconds:.4g}", "busy": "yes" if own.is_busy else ""}
        about = _of_student(each.result.name, each.student) | cells | {"measured": each.result.graded}
        rows.append((own.bytes, own.ratio, about))
    rows += [(answer.bytes, 1.0, _of_student("", Student("", REFERENCE))) for _, (_, answer) in found[:1]]
    rows.sort(key=lambda row: (*row[:2], row[2]["submission"]))
    text = io.StringIO()
    table = csv.DictWriter(text, BOARD, restval="", extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for sent, ratio, about in rows:
        times = f"{sent / least:.3f}" if least else ""
        about |= {"bytes": str(sent), "times_the_limit": times, "times_the_answer": f"{ratio:.3f}"}
        table.writerow({name: _cell(value) for name, value in about.items()})
    _write(path, text.getvalue())
    return len(found)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Check its folder.") from None


def _of_student(submission: str, student: Student | None) -> dict[str, str]:
    return {"submission": submission, **(vars(student) if student else {})}


def _key(row: Mapping[str, str]) -> str:
    return row.get("id") or row["submission"]


def _cell(text: str) -> str:
    """A submission's text as a cell that no spreadsheet reads as a formula."""
    shown = printable(text, LONGEST_CELL)
    return f"'{shown}" if shown[:1] in ("=", "+", "-", "@") else shown
