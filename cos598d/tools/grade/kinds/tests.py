"""Assignments whose submissions are tests: they must pass on right gradient syncs and fail on wrong ones.

No single verdict of a submission's process counts. Right and wrong syncs come in an order that is drawn in secret, each
in processes of its own, and only what tells them apart gives points: tests that fail on a right sync have found nothing
by failing on a wrong one, and tests that reject nothing have not accepted anything.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.terminal.words import listed
from cos598d.tools.check.card import report
from cos598d.tools.check.judge import judge
from cos598d.tools.check.spawn import longer_than, patience, preload, run_world
from cos598d.tools.check.verdict import FAILED, PASSED
from cos598d.tools.grade.kinds.kind import AssignmentKind, all_alike, take_file, take_seconds, take_sizes
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable
from cos598d.tools.grade.under_test import MENDED, RIGHT, WRONG, Subject, on_rank
from cos598d.tools.grade.under_test.file import StudentTest, read_tests

ACCEPTS = "accepts_right_syncs"
EASIEST = ("never_averages", "sums")  # wrong syncs that are always tried: whoever rejects none at all tests nothing
DRAWN = 3  # of the right syncs that bear a wrong one's name
# What a rank has loaded when it is forked: torch.testing, which most tests use, takes a second.
WARM = [
    "torch._dynamo",  # for an optimizer's first step
    "cos598d.tools.grade.under_test.on_rank",
    *(f"cos598d.sync.{name}" for name in ("bucketed", "ddp", "ring")),
    "torch.testing",
]


@dataclass(frozen=True)
class TestsKind(AssignmentKind):
    """A file of tests. `seconds` is what all of them may take together, on one sync and one number of ranks of
    an idle machine."""

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
        """That right syncs are accepted; and each wrong one by its name, which must be rejected. All of them count."""
        wrong = [name for name, subject in WRONG.items() if subject.least_ranks <= self.world_sizes[-1]]
        return dict.fromkeys((ACCEPTS, *wrong), True)

    def expected(self, claim: str) -> str:
        """What a test has to find."""
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
                *(size, on_rank.run_tests, str(path), asked, subject.name),
                seconds=seconds,
                timeout=longer_than(seconds),
            )
            status, reports = judge(ranks, str(path), seconds)
            if status != PASSED:
                return TestRunEnd(status, f"on {size} ranks, {report(reports[0], str(path))}")
        return TestRunEnd(PASSED)


@dataclass(frozen=True)
class TestRunEnd:
    """How the tests ended on a sync: `judge`'s status, and where they did not pass, in words."""

    status: str
    words: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether all tests passed, on every number of ranks."""
        return self.status == PASSED

    @property
    def is_rejected(self) -> bool:
        """Whether a test failed, which is to raise an exception; a process that hangs or leaves has no verdict."""
        return self.status == FAILED


def _of_wrongly_rejected(claims: Sequence[str], subject: Subject, end: TestRunEnd) -> Iterator[Judged]:
    """Of tests that do not pass on a right sync: none of the claims holds."""
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
