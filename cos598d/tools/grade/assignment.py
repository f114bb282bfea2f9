"""An assignment: its kinds of submissions, the points of each test (a claim, in the code), and the limits."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import cos598d
from cos598d.errors import UsageError
from cos598d.records.kinds import FLAG, TEXT, ListOf, Number, OneOf
from cos598d.terminal.printable import printable
from cos598d.terminal.words import did_you_mean
from cos598d.tools.grade.handed_in import LatePolicy
from cos598d.tools.grade.kinds import AssignmentKind, PartsKind
from cos598d.tools.grade.kinds.lesson import LessonKind
from cos598d.tools.grade.kinds.script import ScriptKind
from cos598d.tools.grade.kinds.sync import SyncKind
from cos598d.tools.grade.kinds.tests import TestsKind
from cos598d.tools.grade.scored import Judged, Scored
from cos598d.tools.grade.table import TomlTable

# `kind = "NAME"` in an assignment's file chooses one.
KINDS: dict[str, type[AssignmentKind]] = {
    "sync": SyncKind,
    "script": ScriptKind,
    "lesson": LessonKind,
    "tests": TestsKind,
}
VISIBILITIES = ("visible", "hidden", "after_due_date", "after_published")  # Gradescope's
DEFAULT = "default"
POINTS = Number("a number of points from 0 to 1000000", least=0, most=1e6)


@dataclass(frozen=True)
class Limits:
    """The limits of one submission: of all its processes together, unless stated otherwise."""

    seconds_in_all: float = 540.0  # Gradescope ends an autograder after 10 minutes, unless the teacher allows more
    processes: int = 100
    disk_mb: int = 1024  # in its own folders
    file_mb: int = 256  # of one file
    memory_mb: int = 8192  # of addresses, by one process


@dataclass(frozen=True)
class Assignment:
    """An assignment. `points` are those of each claim that is scored, in the order in which they are judged;
    `environment` names the variables that a submission's processes get.

    together  sets of claims that give points only if all of a set hold
    version   a digest of the whole file; `digest` is one of what the verdicts depend on, without the points
    """

    title: str
    kind_name: str
    kind: AssignmentKind
    points: dict[str, float]
    visibility: str
    environment: tuple[str, ...]
    limits: Limits
    together: tuple[frozenset[str], ...] = ()
    late: LatePolicy | None = None
    version: str = ""
    digest: str = ""

    def scored(self, judged: Sequence[Judged], otherwise: Judged) -> list[Scored]:
        """The scores of all claims; those that were not judged get the result `otherwise` under their own names."""
        known = {each.name: each for each in judged}
        scored = []
        for name, most in self.points.items():
            found = known.get(name, otherwise)
            scored.append(Scored(name, found.passed, found.words, most if found.passed else 0.0, most))
        held = {each.name for each in scored if each.passed}
        broken = {name: tests for tests in self.together if not tests <= held for name in tests & held}
        return [
            replace(each, points=0.0, words=f"{each.words}\n(no points: {', '.join(sorted(broken[each.name] - held))})")
            if each.name in broken
            else each
            for each in scored
        ]


def assignment_of(word: str) -> Assignment:
    """The assignment in a file, or the default one of a kind that `word` names. Raises UsageError."""
    if word in KINDS:
        return read_assignment(TomlTable.of_text(word, f'kind = "{word}"\n'))
    if (near := did_you_mean(word, KINDS)) and not Path(word).exists():
        raise UsageError(
            f"there is no file {word}.{near} Give an assignment's TOML file, or one of {', '.join(KINDS)}."
        )
    return read_assignment(TomlTable.read(Path(word)))


def read_assignment(table: TomlTable) -> Assignment:
    """The assignment in a TOML table. Raises UsageError, with the line, for what cannot work."""
    title = table.take("title", TEXT)
    visibility = table.take("visibility", OneOf(VISIBILITIES), VISIBILITIES[0])
    environment = tuple(table.take("environment", ListOf(TEXT), []))
    late = LatePolicy.read(table.table("late"))
    limits = _limits(table.table("limits"))
    known = ("title", "visibility", "environment", "late", "limits")
    parts = table.table("parts")
    if names := list(parts.left()):
        table.end((*known, "parts"))
        odd = next((name for name in names if not re.fullmatch(r"[\w-]+", name)), None)
        if odd is not None:
            raise parts.error(odd, f"the part {printable(odd, 60)} has an odd name. Use letters, digits, _ and -")
        name, read = "parts", {name: _AssignmentPart.read(parts.table(name)) for name in names}
        kind: AssignmentKind = PartsKind({name: part.kind for name, part in read.items()})
        points = {f"{name}.{claim}": most for name, part in read.items() for claim, most in part.points.items()}
        together = tuple(
            frozenset(f"{name}.{claim}" for claim in group) for name, part in read.items() for group in part.together
        )
        judged_by = [part.judged_by for part in read.values()]
        default = " and ".join(names)
    else:
        part = _AssignmentPart.read(table, known)
        name, kind, points, together, judged_by = part.name, part.kind, part.points, part.together, [part.judged_by]
        default = f"{name} assignment"
    given = {name: os.environ.get(name) for name in environment}
    facts = (_of_package(), sys.version, torch.__version__, judged_by, list(points), given, vars(limits))
    version, digest = (hashlib.sha256(text.encode()).hexdigest() for text in (table.source, json.dumps(facts)))
    return Assignment(
        *(title or default, name, kind, points, visibility, environment, limits, together, late, version[:12], digest)
    )


def package_files() -> Iterator[tuple[str, bytes]]:
    """The files of this package, in order: the path of each within it, and its content."""
    package = Path(cos598d.__file__).parent
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(package).as_posix(), path.read_bytes()


def _of_package() -> str:
    """A digest of this package's files, since other files may judge differently."""
    found = hashlib.sha256()
    for name, data in package_files():
        found.update(b"%d %s %d " % (len(name), name.encode(), len(data)) + data)
    return found.hexdigest()


@dataclass(frozen=True)
class _AssignmentPart:
    """The kind, the points and the groups in one table; `judged_by` are the kind's keys and values."""

    name: str
    kind: AssignmentKind
    points: dict[str, float]
    together: tuple[frozenset[str], ...]
    judged_by: dict[str, object]

    @classmethod
    def read(cls, table: TomlTable, more: Sequence[str] = ()) -> "_AssignmentPart":
        """Read them from the table; `more` are the keys that are read already. Raises UsageError."""
        given = table.left()
        name = table.take("kind", OneOf(tuple(KINDS)))
        if name is None:
            where = f"{table.path}{f' [{table.within}]' if table.within else ''}"
            raise UsageError(f"{where} has no kind. Give one of {', '.join(KINDS)}.")
        kind = KINDS[name].read(table)
        points, together = _points(table.table("points"), table.table("groups"), kind)
        table.end((*more[:1], "kind", *KINDS[name].keys, "points", "groups", *more[1:]))
        return cls(name, kind, points, together, {key: given[key] for key in ("kind", *kind.keys) if key in given})


def _points(
    table: TomlTable, groups: TomlTable, kind: AssignmentKind
) -> tuple[dict[str, float], tuple[frozenset[str], ...]]:
    """The points of each claim that is scored, and the sets that give points together. Raises UsageError.

    Scored are the claims that are named, in `table` or a group, and what the kind scores anyway. A group's claims get
    equal shares of its points.
    """
    default = table.take(DEFAULT, POINTS, 1)
    known = kind.claims()
    named = {name: given for name in known if (given := table.take(name, POINTS)) is not None}
    table.end((DEFAULT, *known))
    together = []
    for group in map(groups.table, groups.left()):
        tests = dict.fromkeys(group.take("tests", ListOf(TEXT), []))
        wrong = next((test for test in tests if test not in known or test in named), None)
        if wrong is not None:
            why = "has points already" if wrong in known else f"is not a test. Use some of {', '.join(known)}"
            raise group.error("tests", f"tests: {wrong} {why}")
        if not tests:
            raise group.error(
                "tests", f'the group {group.within} has no tests. Name some, as tests = ["{next(iter(known))}"]'
            )
        named |= dict.fromkeys(tests, group.take("points", POINTS, len(tests)) / len(tests))
        if group.take("together", FLAG, False):
            together.append(frozenset(tests))
        group.end(("tests", "points", "together"))
    found = {name: named.get(name, default if each is True else each) for name, each in known.items()}
    points = {name: float(each) for name, each in found.items() if each}
    if not points:
        raise table.error("points", "no test gives points. Give one of them more than 0")
    return points, tuple(together)


def _limits(table: TomlTable) -> Limits:
    defaults = Limits()
    seconds = Number("a number of seconds above 0", least=0, most=1e6, is_above=True)
    above = Number("a whole number above 0", least=1, most=1e9, is_whole=True)
    whole = ("processes", "disk_mb", "file_mb", "memory_mb")
    found = Limits(
        float(table.take("seconds_in_all", seconds, defaults.seconds_in_all)),
        *(table.take(name, above, getattr(defaults, name)) for name in whole),
    )
    table.end(("seconds_in_all", *whole))
    return found
