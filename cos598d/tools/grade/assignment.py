"""An assignment: what is handed in, the tests that judge it, and the points of each."""

import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cos598d.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# `tests` in an assignment's file: one of these, `lessonN`, or a file of pytest's tests of your own.
SYNC, SCRIPT, LESSON = "sync", "script", "lesson"
FILES = {SYNC: "my_sync.py", SCRIPT: "train.py"}
PACKAGE = "cos598d.tools"
Points = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Assignment(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of an assignment's file.

    tests       what judges a submission: `lesson3`, `sync`, `script`, or the path of a file of tests
    file        what a submission's file is called; by default lessonN.py, my_sync.py or train.py
    class_name  of `sync`: the class in it
    points      by test; "default" is for those that are not named
    seconds     that a submission may take in all. Gradescope ends an autograder after 10 minutes
    visibility  of the results on Gradescope: visible, hidden, after_due_date, after_published
    sizes       numbers of ranks, for `sync` and `script`
    """

    tests: str
    title: str = ""
    file: str = ""
    class_name: str = "MySync"
    points: dict[str, Points] = {}
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 540.0
    visibility: str = "visible"
    sizes: list[int] = msgspec.field(default_factory=lambda: [2, 3])

    @property
    def file_name(self) -> str:
        """What a submission's file is called."""
        return self.file or FILES.get(self.tests, f"{self.tests}.py")

    def words(self, submission: Path) -> list[str]:
        """What pytest is called with, to judge this file."""
        exam = ["-p", f"{PACKAGE}.exam.plugin", "--file", str(submission)]
        sizes = ",".join(map(str, self.sizes))
        if self.tests == SYNC:
            own = f"{submission}:{self.class_name}"
            check = ["-p", f"{PACKAGE}.check.plugin", "--sync", own, "--sizes", sizes]
            return [_place("check/test_sync.py"), *exam, *check]
        if self.tests == SCRIPT:
            return [_place("grade/test_script.py"), *exam, "-p", f"{PACKAGE}.check.plugin", "--sizes", sizes]
        if self.tests.startswith(LESSON):
            return [_place(f"course/lessons/{self.tests}/test_lesson.py"), *exam]
        return [str(Path(self.tests).resolve()), *exam]


def _place(path: str) -> str:
    return str(files(PACKAGE).joinpath(*path.split("/")))


def assignment_of(word: str) -> Assignment:
    """The assignment in a TOML file, or one with the defaults, by the name of its tests. Raises UsageError."""
    path = Path(word)
    if not path.exists() and path.suffix != ".toml":
        return check(Assignment(word), f"--assignment {word}")
    try:
        facts: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return check(msgspec.convert(facts, Assignment), word)
    except (OSError, ValueError) as error:  # TOML's and msgspec's errors are ValueErrors
        keys = ", ".join(Assignment.__struct_fields__)
        raise UsageError(f"{word} is no assignment: {error}. The keys are {keys}.") from None


def check(assignment: Assignment, where: str) -> Assignment:
    """The assignment. Raises UsageError if its tests do not exist."""
    tests = assignment.tests
    if tests not in FILES and not Path(Assignment(tests).words(Path("x.py"))[0]).is_file():
        raise UsageError(
            f"{where}: there are no tests {tests}. Give lesson0 to lesson19, {', '.join(FILES)}, or the path of a file "
            "of tests."
        )
    return assignment
