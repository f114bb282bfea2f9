"""A submission as it was handed in: its files, its time by its files or by Git, and the cost of lateness."""

import hashlib
import math
import os
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from cos598d.records.kinds import Number, Of, OneOf
from cos598d.terminal.reading import read_plain
from cos598d.tools.grade.table import TomlTable

TIMES = ("file", "git")
DAY = 24 * 60 * 60
GIT_SECONDS = 10
MOST_BYTES = 1 << 20
MOST_DIGESTED = 512 << 20


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
