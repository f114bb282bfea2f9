"""Whose rights a submission's processes have: where the grader is root, those of the user nobody, if that works."""

import importlib.util
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cos598d.tools.check.supervisor import prctl
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.processes import scratch_base

NOBODY = "nobody"
SET_NO_NEW_PRIVILEGES = 38  # prctl(2)
IMPORTED = ("cos598d", "torch", "numpy", "psutil")  # whose files stand for all that ranks read
MOST_WORDS = 1000


@dataclass(frozen=True)
class User:
    """Another user than the grader's."""

    uid: int
    gid: int

    def take(self, folder: Path) -> None:
        """Make this user the owner of a folder of the grader's and of all that is in it; links are not followed."""
        for place, folders, files in os.walk(folder, topdown=False):
            for name in (*folders, *files, os.curdir):
                os.chown(os.path.join(place, name), self.uid, self.gid, follow_symlinks=False)

    def become(self) -> None:
        """From now on this process, and all that it starts, has this user's rights alone. Raises OSError."""
        os.setgroups([])
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        prctl(SET_NO_NEW_PRIVILEGES, 1)


def user_for(needed: Sequence[str]) -> tuple[User | None, str]:
    """Whose rights submissions get that read the files and folders `needed`; None: the grader's own.

    With it, where the grader is root and submissions will be too, a sentence that says why.
    """
    if os.geteuid() != 0:
        return None, ""
    try:
        found = pwd.getpwnam(NOBODY)
    except KeyError:
        return None, _sentence(f"there is no user {NOBODY}")
    user = User(found.pw_uid, found.pw_gid)
    why = _what_stops(user, needed)
    return (None, _sentence(why)) if why else (user, "")


def needed_by(assignment: Assignment) -> list[str]:
    """What submissions of this assignment have to read: Python, packages, temporary files and what it names."""
    specs = [importlib.util.find_spec(name) for name in IMPORTED]
    named = [os.environ.get(name, "") for name in assignment.environment]
    return [
        sys.executable,
        os.__file__,
        *(spec.origin for spec in specs if spec and spec.origin),
        scratch_base(),
        *(path for path in named if os.path.exists(path)),
    ]


def _sentence(why: str) -> str:
    return f"Submissions run as root, since {why}: they can end the grader, change its results and read all files."


def _what_stops(user: User, needed: Sequence[str]) -> str:
    """Why a process with this user's rights would not do, as another process finds; "" where it would."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        _try(user, needed, writes)
    os.close(writes)
    with os.fdopen(reads, "rb") as line:
        said = line.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    return said or (f"a process of {NOBODY} cannot be tried" if status else "")


def _try(user: User, needed: Sequence[str], line: int) -> NoReturn:
    status = 1
    try:
        user.become()
        unread = next((path for path in needed if not _is_readable(path)), None)
        status = 0
        if unread is not None:
            os.write(line, f"{NOBODY} cannot read {unread}".encode(errors="replace")[:MOST_WORDS])
    except OSError as error:
        os.write(line, f"no process can become {NOBODY}'s ({error.strerror})".encode()[:MOST_WORDS])
    finally:
        os._exit(status)


def _is_readable(path: str) -> bool:
    return os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK)
