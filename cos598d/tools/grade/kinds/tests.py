"""Assignments whose submissions are tests: they must pass on right gradient syncs and fail on wrong ones.

No single verdict of a submission's process counts. Right and wrong syncs run in a secret random order, each in
processes of its own. Only the difference between them gives points. Tests that fail on a right sync prove nothing by
failing on a wrong one. Tests that reject nothing accept nothing.
"""

import ast
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain
from cos598d.terminal.words import listed
from cos598d.tools.check.card import report
from cos598d.tools.check.judge import judge
from cos598d.tools.check.spawn import longer_than, patience, preload, run_world
from cos598d.tools.check.verdict import FAILED, PASSED
from cos598d.tools.grade.kinds import AssignmentKind, all_alike, take_file, take_seconds, take_sizes
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable
from cos598d.tools.grade.under_test import MENDED, RIGHT, WRONG, Subject, run_tests

GIVEN = ("sync", "rank", "world_size")
PREFIX = "test_"
MOST_BYTES = 1 << 20
ACCEPTS = "accepts_right_syncs"
EASIEST = ("never_averages", "sums")  # wrong syncs that are always tried: whoever rejects none at all tests nothing
DRAWN = 3  # of the right syncs that bear a wrong one's name
# What a rank has loaded when it is forked: torch.testing, which most tests use, takes a second.
WARM = [
    "torch._dynamo",  # for an optimizer's first step
    "cos598d.tools.grade.under_test",
    *(f"cos598d.sync.{name}" for name in ("bucketed", "ddp", "ring")),
    "torch.testing",
]


@dataclass(frozen=True)
class StudentTest:
    """A function of the file. `arguments` are the names in GIVEN that it asks for."""

    name: str
    arguments: tuple[str, ...]
    line: int


def read_tests(path: Path) -> list[StudentTest]:
    """The file's tests, in order. Raises UsageError, with the line, if something cannot be run as a test."""
    try:
        source = read_plain(path)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read ({error.strerror}).") from None
    if len(source) > MOST_BYTES:
        raise UsageError(f"{path.name} has {len(source)} bytes. Keep a file of tests below {MOST_BYTES}.")
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise UsageError(f"{path.name} is not valid Python ({error.msg}, line {error.lineno}).") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{path.name} is not valid Python ({error or 'nested too deeply'}).") from None
    found: dict[str, StudentTest] = {}
    for node in body:
        _check_runs(node, path.name)
        if isinstance(node, ast.FunctionDef) and node.name.startswith(PREFIX):
            test = StudentTest(node.name, _arguments(node, path.name), node.lineno)
            if test.name in found:
                before = found[test.name].line
                raise UsageError(
                    f"{path.name} line {test.line}: the test {printable(test.name, 60)} of line {before} would never "
                    "run, because this one has its name. Give each test a name of its own."
                )
            found[test.name] = test
    if not found:
        raise UsageError(
            f"{path.name} has no test. Write functions whose names begin with {PREFIX}, outside of any class."
        )
    return list(found.values())


def _check_runs(node: ast.stmt, file: str) -> None:
    """Raise UsageError for something that looks like a test but would not run, or not as its decorators ask."""
    if isinstance(node, ast.ClassDef):
        inner = next((each for each in node.body if _is_test(each)), None)
        if inner is not None:
            raise UsageError(f"{_place(inner, file)} would never run in a class. Write it outside of any.")
    elif _is_test(node):
        marks = [ast.unparse(each) for each in node.decorator_list]
        marked = next((mark for mark in marks if mark.startswith(("pytest.", "mark.", "unittest."))), None)
        if marked is not None:
            raise UsageError(
                f"{_place(node, file)} is marked {printable(marked, 60)}, which the grader does not support. Write a "
                "loop for several values, and raise unittest.SkipTest to skip."
            )
        if isinstance(node, ast.AsyncFunctionDef) or any(map(_yields, node.body)):
            raise UsageError(f"{_place(node, file)} would never run. Write it without async and yield.")


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(PREFIX)


def _yields(node: ast.AST) -> bool:
    """Whether it has a yield, except inside functions and classes that it defines."""
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    is_inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
    return not is_inner and any(map(_yields, ast.iter_child_nodes(node)))


def _place(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> str:
    return f"{file} line {node.lineno}: {printable(node.name, 60)}"


def _arguments(node: ast.FunctionDef, file: str) -> tuple[str, ...]:
    """The function's arguments. Raises UsageError for one that the grader does not give to tests."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    needed = [*positional[: len(positional) - len(given.defaults)]]
    needed += [each for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    unknown = next((each.arg for each in needed if each.arg not in GIVEN), None)
    if unknown is not None or given.posonlyargs:
        what = printable(unknown or "what is before /", 60)
        raise UsageError(
            f"{file} line {node.lineno}: {printable(node.name, 60)} asks for {what}. A test can ask for "
            f"{', '.join(GIVEN[:-1])} and {GIVEN[-1]}, by these names."
        )
    return tuple(each.arg for each in (*positional, *given.kwonlyargs) if each.arg in GIVEN)


@dataclass(frozen=True)
class TestsKind(AssignmentKind):
    """A file of tests. `seconds` is the time limit of all of them together, on one sync and one number of ranks of an
    idle machine."""

    file: str
    world_sizes: tuple[int, ...]
    seconds: float

    keys = ("file", "world_sizes", "seconds")

    @classmethod
    def read(cls, table: TomlTable) -> "TestsKind":
        """Take this kind's keys. Raises UsageError."""
        file = take_file(table, "test_sync.py")
        sizes = take_sizes(table, [2, 3], least=2)
        return cls(file, sizes, take_seconds(table, 10.0))

    def claims(self) -> Mapping[str, bool]:
        """That right syncs are accepted, and that each wrong one, by its name, is rejected. All of them are scored."""
        wrong = [name for name, subject in WRONG.items() if subject.least_ranks <= self.world_sizes[-1]]
        return dict.fromkeys((ACCEPTS, *wrong), True)

    def expected(self, claim: str) -> str:
        """What the tests must do."""
        if claim == ACCEPTS:
            return "All tests pass on correct syncs, and some test fails on a wrong one."
        return f"A test fails on a sync that {WRONG[claim].words}."

    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """Run the tests on every right sync, and on the wrong ones that are scored."""
        path = folder / self.file
        try:
            tests = read_tests(path)
        except UsageError as error:
            yield from all_alike(claims, False, str(error))
            return
        preload(WARM)
        wrong = dict.fromkeys((*EASIEST, *(name for name in claims if name != ACCEPTS)))
        draw = secrets.SystemRandom()
        right = [*RIGHT.values(), *draw.sample(list(MENDED.values()), DRAWN)]
        subjects = [*right, *(WRONG[name] for name in wrong)]
        draw.shuffle(subjects)
        ends: dict[str, TestRunEnd] = {}
        for subject in subjects:
            end = ends[subject.name] = self._end(path, tests, subject)
            if subject in right and not end.is_accepted:
                yield from _of_wrongly_rejected(claims, subject, end)
                return
        rejected = [subject for subject in subjects if ends[subject.name].is_rejected]
        for name in claims:
            if name == ACCEPTS:
                on = f"on {listed(self.world_sizes)} ranks"
                words = f"all tests pass on {len(RIGHT) + DRAWN} correct syncs, {on}"
                if not rejected:
                    words = (
                        f"no test fails on any sync, correct or wrong, {on}: tests that reject nothing accept nothing"
                    )
                yield Judged(name, bool(rejected), words)
            else:
                yield Judged(name, ends[name].is_rejected, _of_wrong(WRONG[name], ends[name]))

    def _end(self, path: Path, tests: Sequence[StudentTest], subject: Subject) -> "TestRunEnd":
        """How the tests end on this sync: on more and more ranks, up to the first number on which not all pass."""
        seconds = self.seconds * patience()
        asked = [(test.name, test.arguments) for test in tests]
        for size in self.world_sizes:
            ranks = run_world(
                *(size, run_tests, str(path), asked, subject.name),
                seconds=seconds,
                timeout=longer_than(seconds),
            )
            status, reports = judge(ranks, str(path), seconds)
            if status != PASSED:
                return TestRunEnd(status, f"on {size} ranks, {report(reports[0], str(path))}")
        return TestRunEnd(PASSED)


@dataclass(frozen=True)
class TestRunEnd:
    """How the tests ended on a sync: `judge`'s status; and, if they did not pass, why."""

    status: str
    words: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether all tests passed, on every number of ranks."""
        return self.status == PASSED

    @property
    def is_rejected(self) -> bool:
        """Whether a test failed by raising an exception. A process that hangs or exits has no verdict."""
        return self.status == FAILED


def _of_wrongly_rejected(claims: Sequence[str], subject: Subject, end: TestRunEnd) -> Iterator[Judged]:
    """The verdicts on tests that do not pass on a right sync: no claim holds."""
    why = f"the tests do not pass on a correct sync, which {subject.words}"
    for name in claims:
        if name == ACCEPTS:
            yield Judged(name, False, f"{why}: {end.words}")
        else:
            yield Judged(name, False, f"{why}; so it proves nothing if they fail on a wrong one")


def _of_wrong(subject: Subject, end: TestRunEnd) -> str:
    if end.is_rejected:
        return f"rejected: {end.words}"
    if end.is_accepted:
        return f"no test fails on a sync that {subject.words}"
    return f"no test fails on a sync that {subject.words}: {end.words}; a test fails by raising an exception"
