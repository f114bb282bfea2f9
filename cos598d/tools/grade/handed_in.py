"""Submissions as they were handed in: their files and times, the cost of lateness, whose they are, and similar ones."""

import builtins
import csv
import hashlib
import io
import itertools
import keyword
import math
import os
import re
import stat
import subprocess
import tempfile
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.records.kinds import Number, Of, OneOf
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain
from cos598d.tools.grade.table import TomlTable

TIMES = ("file", "git")
DAY = 24 * 60 * 60
GIT_SECONDS = 10
MOST_DIGESTED = 512 << 20
TOGETHER = 8  # tokens that are compared at once
FEWEST = 40  # of them that a submission needs: short ones are alike by chance
LEAST = 0.9  # of all that two have, they must share so much
MOST_BYTES = 1 << 20
LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
KEPT = frozenset((*keyword.kwlist, *keyword.softkwlist, *dir(builtins)))


def plain_files(source: Path) -> list[Path]:
    """The plain files of a folder, or the file itself; in order. Raises OSError.

    Links are left out, and what tools leave: __pycache__, and names that begin with a dot or # or end with ~. So a
    check of a submission, which writes .cos598d into its folder, changes neither its digest nor its time.
    """
    folders, found = [source] if source.is_dir() else [], [] if source.is_dir() else [source]
    while folders:
        for entry in sorted(os.scandir(folders.pop()), key=lambda each: each.name):
            if entry.name[0] in ".#" or entry.name[-1] == "~" or entry.name == "__pycache__":
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                found.append(Path(entry.path))
    return found


def digest_of(source: Path) -> str:
    """A digest of the names and contents of a submission's files; "" if they cannot be read or are too large."""
    found, left = hashlib.sha256(), MOST_DIGESTED
    try:
        for path in plain_files(source):
            data = read_plain(path, left, follows=False)
            left -= len(data)
            name = os.fsencode(path.relative_to(source))
            found.update(b"%d %s %d " % (len(name), name, len(data)) + data)
    except OSError:
        return ""
    return found.hexdigest()


@dataclass(frozen=True)
class LatePolicy:
    """Each day begun after `deadline` costs `points_per_day`; `times` is "file" or "git", the times that count."""

    deadline: datetime
    points_per_day: float
    times: str = TIMES[0]

    @classmethod
    def read(cls, table: TomlTable) -> "LatePolicy | None":
        """The policy in the table `late`; None without one. Raises UsageError."""
        if not table.left():
            return None
        words = "a date and a time with its offset, as 2026-10-01T23:59:00-04:00"
        deadline = table.take("deadline", Of(words, (datetime,)))
        points = table.take("points_per_day", Number("a number of points from 0 to 1000000", least=0, most=1e6))
        times = table.take("times", OneOf(TIMES), TIMES[0])
        table.end(("deadline", "points_per_day", "times"))
        if deadline is None or points is None:
            raise table.error("late", "[late] needs deadline and points_per_day. Give both")
        if deadline.tzinfo is None:
            raise table.error("deadline", f"deadline is {deadline}. Give {words}")
        return cls(deadline, float(points), times)

    def days(self, handed_in: "HandedIn") -> int:
        """The days that a submission is late, each that has begun; 0 if it is not late or has no time."""
        time = handed_in.time(self.times)
        return max(0, math.ceil((time - self.deadline).total_seconds() / DAY)) if time else 0


@dataclass(frozen=True)
class HandedIn:
    """When the newest of a submission's files was changed, and its last commit with its time (UTC)."""

    changed: datetime | None
    commit: str = ""
    committed: datetime | None = None

    def time(self, which: str) -> datetime | None:
        """The time of the commit, where that is asked for and known; else that of the files."""
        return self.committed if which == "git" and self.committed else self.changed


def handed_in(source: Path) -> HandedIn:
    """The times of a submission's files, which students can set to anything."""
    try:
        newest = max((os.stat(path, follow_symlinks=False).st_mtime for path in plain_files(source)), default=None)
        changed = None if newest is None else datetime.fromtimestamp(newest, timezone.utc)
    except (OSError, ValueError, OverflowError):
        changed = None
    return HandedIn(changed, *_last_commit(source / ".git"))


def _last_commit(git: Path) -> tuple[str, datetime | None]:
    """The commit that is checked out and its time; "" and None if they cannot be read.

    Git reads the student's objects and names of commits, and none of his settings, which can name programs.
    """
    environ = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    environ |= {"GIT_OBJECT_DIRECTORY": str((git / "objects").absolute()), "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
    with tempfile.TemporaryDirectory() as own:
        try:
            for name in ("HEAD", "packed-refs"):
                if (git / name).exists():
                    Path(own, name).write_bytes(read_plain(git / name, MOST_BYTES, follows=False))
            Path(own, "refs").symlink_to((git / "refs").absolute())
            words = ["git", f"--git-dir={own}", "rev-list", "--max-count=1", "--format=%ct", "HEAD"]
            said = subprocess.run(words, env=environ, cwd=own, capture_output=True, timeout=GIT_SECONDS, check=True)
            _, commit, seconds = said.stdout.decode().split()
            return commit, datetime.fromtimestamp(int(seconds), timezone.utc)
        except (OSError, subprocess.SubprocessError, ValueError, OverflowError):
            return "", None


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


def fingerprint(source: str) -> frozenset[tuple[str, ...]]:
    """The runs of TOGETHER tokens in Python source, without comments, docstrings and the names that it chose.

    Keywords, built-in names and names after a dot stay, which nobody can rename. Empty where it is no Python.
    """
    found: list[str] = []
    before = "\n"
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in LEFT_OUT or (token.type == tokenize.STRING and before == "\n"):
                continue
            is_chosen = token.type == tokenize.NAME and token.string not in KEPT and before != "."
            before = "name" if is_chosen else "text" if token.type == tokenize.STRING else token.string.strip(" \t\r")
            if before != "\n" or found[-1:] != ["\n"]:
                found.append(before)
    except (tokenize.TokenError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(zip(*(found[start:] for start in range(TOGETHER)), strict=False))


def similar_pairs(submissions: Mapping[str, Path], given: str) -> list[tuple[float, str, str]]:
    """How much two submissions share (up to 1), and their names, the most similar first. `given` code is left out."""
    known = fingerprint(given)
    prints = {name: fingerprint(_source(path)) - known for name, path in submissions.items()}
    large = [(name, found) for name, found in prints.items() if len(found) >= FEWEST]
    pairs = []
    for (one, first), (other, second) in itertools.combinations(large, 2):
        share = 2 * len(first & second) / (len(first) + len(second))
        if share >= LEAST:
            pairs.append((share, one, other))
    return sorted(pairs, key=lambda pair: (-pair[0], *pair[1:]))


def _source(path: Path) -> str:
    """All Python files of a submission in one text; "" if they cannot be read or are too large."""
    try:
        files = [file for file in plain_files(path) if file.suffix == ".py"]
        return "\n".join(read_plain(file, MOST_BYTES, follows=False).decode(errors="replace") for file in files)
    except OSError:
        return ""
