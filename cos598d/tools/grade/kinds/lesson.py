"""Assignments whose submissions are files of the course's lessons: the checks of `learn N --check`."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cos598d
from cos598d.errors import UsageError
from cos598d.records.kinds import COUNT
from cos598d.tools.check.verdict import PASSED
from cos598d.tools.grade.kinds.kind import AssignmentKind, all_alike, take_file, take_seconds
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable
from cos598d.tools.learn.lessons import Lesson, get_lesson
from cos598d.tools.learn.marking import SECONDS, Marking
from cos598d.tools.learn.picture import draw
from cos598d.tools.learn.session import RANKS, record_file, warm_up
from cos598d.tools.learn.student import read_file

ANSWERS = "tools/learn/lessons/*/answer/*.txt"  # in this package; submissions could read them


@dataclass(frozen=True)
class LessonKind(AssignmentKind):
    """A lesson's file. `seconds` is what all its checks may take on one number of ranks of an idle machine."""

    file: str
    lesson: Lesson
    seconds: float

    keys = ("file", "lesson", "seconds")

    @property
    def hides(self) -> tuple[Path, ...]:  # type: ignore[override]
        """The lessons' answers, where they are installed, and in a clone the files of its tests that pass too."""
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
        return cls(take_file(table, lesson.file_name), lesson, take_seconds(table, SECONDS))

    def claims(self) -> Mapping[str, bool]:
        """The lesson's checks, all of which count."""
        return {check.name: True for check in self.lesson.load_checks().checks}

    def expected(self, claim: str) -> str:
        """What the lesson says of the check."""
        return next(
            " ".join(each.claim.says.split()) for each in self.lesson.load_checks().checks if each.name == claim
        )

    def given(self) -> str:
        """The lesson's page."""
        return self.lesson.page()

    def pictures(self, folder: Path) -> Iterator[tuple[str, str]]:
        """What the ranks do in one step, of a lesson in which they send something."""
        if self.lesson.has_picture:
            own = record_file(self.lesson, folder / self.file)
            if own and own.events:
                yield f"One step of {self.file} on {RANKS} ranks", draw(own.events, title=self.file).svg()

    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """Try all checks, on one number of ranks after the other."""
        path = folder / self.file
        try:
            source = read_file(path, self.lesson)
        except UsageError as error:
            yield from all_alike(claims, False, str(error))
            return
        warm_up(self.lesson)
        marking = Marking(self.lesson, path, source, secrets.randbits(32), self.seconds)
        marking.run(lambda _: None)
        for facts in marking.result()["claims"]:
            if facts["claim"] in claims:
                words = dict.fromkeys(word for outcome in facts["outcomes"] for word in outcome["reports"])
                said = "\n".join(words) or (marking.static.words if marking.static else facts["status"])
                passed = facts["status"] == PASSED
                yield Judged(facts["claim"], passed, facts["says"] if passed else said)
