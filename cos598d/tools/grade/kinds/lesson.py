"""Assignments whose submissions are files of the course's lessons: the checks of `learn N --check`."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cos598d
from cos598d.errors import UsageError, UserError
from cos598d.records.kinds import COUNT, Number
from cos598d.terminal.words import number_of
from cos598d.tools.check.verdict import PASSED
from cos598d.tools.grade.kinds import AssignmentKind, Golfed, all_alike, take_file, take_seconds
from cos598d.tools.grade.scored import WITHOUT_HINT, Judged
from cos598d.tools.grade.table import TomlTable
from cos598d.tools.learn.lessons import Lesson, get_lesson
from cos598d.tools.learn.marking import SECONDS, Marking
from cos598d.tools.learn.picture import draw
from cos598d.tools.learn.progress import hints_in
from cos598d.tools.learn.session import RANKS, measured, record_file, warm_up
from cos598d.tools.learn.student import read_file

ANSWERS = "tools/learn/lessons/*/answer/*.txt"  # in this package; submissions could read them


@dataclass(frozen=True)
class LessonKind(AssignmentKind):
    """A lesson's file. `seconds` is the time limit of all its checks on one number of ranks of an idle machine.
    `hint_cost` is the points that each hint costs that was shown; 0: none."""

    file: str
    lesson: Lesson
    seconds: float
    hint_cost: float = 0.0

    keys = ("file", "lesson", "seconds", "hint_cost")

    @property
    def hides(self) -> tuple[Path, ...]:  # type: ignore[override]
        """The lessons' answers, if they are installed; and in a clone, the tests' files that pass and the history."""
        package = Path(cos598d.__file__).parent
        answers = sorted({path.parent for path in package.glob(ANSWERS)})
        clone = [package.parent / "tests" / "lesson_cases", package.parent / ".git"]
        return (*answers, *(each for each in clone if each.is_dir()))

    @classmethod
    def read(cls, table: TomlTable) -> "LessonKind":
        """Take this kind's keys. Raises UsageError."""
        number = table.take("lesson", COUNT, 0)
        try:
            lesson = get_lesson(number)
        except UsageError as error:
            raise table.error("lesson", str(error)) from None
        cost = table.take("hint_cost", Number("a number of points from 0 to 1000000", least=0, most=1e6), 0.0)
        return cls(take_file(table, lesson.file_name), lesson, take_seconds(table, SECONDS), float(cost))

    def claims(self) -> Mapping[str, float]:
        """The lesson's checks, which are all scored. If hints cost points, also one claim for each hint: that it was
        not shown."""
        hints = dict.fromkeys(self._hints(), self.hint_cost) if self.hint_cost else {}
        return {check.name: True for check in self.lesson.load_checks().checks} | hints

    def _hints(self) -> list[str]:
        return [f"{WITHOUT_HINT}{number}" for number in range(1, len(self.lesson.hints) + 1)]

    def expected(self, claim: str) -> str:
        """What the lesson's check requires, or what an unused hint requires."""
        if claim in self._hints():
            number = claim.removeprefix(WITHOUT_HINT)
            shown = f"{number} hint{' was' if number == '1' else 's were'} shown"
            return f"All checks pass, and the file's last line says that fewer than {shown}."
        return next(
            " ".join(each.claim.says.split()) for each in self.lesson.load_checks().checks if each.name == claim
        )

    def given(self) -> str:
        """The lesson's page."""
        return self.lesson.page()

    def pictures(self, folder: Path) -> Iterator[tuple[str, str]]:
        """One step of the ranks, if the lesson sends something."""
        if self.lesson.has_picture:
            own = record_file(self.lesson, folder / self.file)
            if own and own.events:
                yield f"One step of {self.file} on {RANKS} ranks", draw(own.events, title=self.file).svg()

    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """Try all checks on one number of ranks after another, then count the hints that were shown."""
        path = folder / self.file
        try:
            source = read_file(path, self.lesson)
        except UsageError as error:
            yield from all_alike(claims, False, str(error))
            return
        warm_up(self.lesson)
        marking = Marking(self.lesson, path, source, secrets.randbits(32), self.seconds)
        marking.run(lambda _: None)
        result = marking.result()
        for facts in result["claims"]:
            if facts["claim"] in claims:
                words = dict.fromkeys(word for outcome in facts["outcomes"] for word in outcome["reports"])
                said = "\n".join(words) or (marking.static.words if marking.static else facts["status"])
                passed = facts["status"] == PASSED
                yield Judged(facts["claim"], passed, facts["says"] if passed else said)
        shown = hints_in(source, self.lesson)
        for number, name in enumerate(self._hints(), 1):
            if name in claims and not result["passed"]:
                yield Judged(name, False, "not all checks pass")
            elif name in claims and shown is None:
                why = f"{self.file} has no line of its hints, or a changed one, so all count as shown"
                yield Judged(name, False, f"{why}: keep the line that `learn {self.lesson.number}` writes")
            elif name in claims:
                verb = "was" if shown == 1 else "were"
                told = f"{shown} of {number_of(len(self.lesson.hints), 'hint')} {verb} shown"
                yield Judged(name, (shown or 0) < number, told)

    def golf(self, folder: Path, failed: Sequence[str], answer: str) -> Golfed | None:
        """Measured as by `learn N --golf`, which also runs the lesson's checks in each round."""
        if not self.lesson.golf or set(failed) - set(self._hints()):
            return None
        try:
            return measured(self.lesson, folder / self.file, answer)[:2]
        except UserError:  # a check fails in one of the rounds
            return None
