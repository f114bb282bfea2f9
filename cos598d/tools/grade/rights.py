"""What a submission's processes may: where the grader is root they have the rights of the user nobody, if that works;
and they find folders empty that they must not read."""

import ctypes
import importlib.util
import os
import pwd
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.tools.check.supervisor import prctl
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.processes import SET_DUMPABLE, scratch_base

NOBODY = "nobody"
SET_NO_NEW_PRIVILEGES = 38  # prctl(2)
NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000  # unshare(2)
BIND, PRIVATE_ALL = 0x1000, 0x44000  # mount(2)
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
        """From now on this process, and all that it starts, has this user's rights only. Raises OSError."""
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
        user = User(found.pw_uid, found.pw_gid)
        why = _said_elsewhere(lambda: _unread_by(user, needed))
    except KeyError:
        why = f"There is no user {NOBODY}"
    if not why:
        return user, ""
    return None, f"{why}. Then submissions run as root: they can end the grader, change its results and read all files."


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


def _unread_by(user: User, needed: Sequence[str]) -> str:
    """Become this user, and say what of `needed` is unreadable then, or why that is refused; "" where all is well."""
    try:
        user.become()
    except OSError as error:
        return f"No process can become {NOBODY}'s ({error.strerror})"
    for path in needed:
        if not os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK):
            return f"The user {NOBODY} cannot read {path}"
    return ""


def hide(folders: Sequence[Path], empty: Path) -> None:
    """From now on this process, and all that it starts, finds what is in `empty` in each of the folders (Linux).

    Who is not root becomes the owner of mounts for it, until the next program is started. Raises OSError.
    """
    if not folders:
        return
    ids = (os.getuid(), os.getgid())
    if os.geteuid() == 0:
        _call("unshare", NEW_MOUNTS)
    else:
        _call("unshare", NEW_MOUNTS | NEW_USERS)
        prctl(SET_DUMPABLE, 1)  # else the next files are root's
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), ids, strict=True):
            Path("/proc/self", name).write_text(f"{number} {number} 1")
    _call("mount", None, b"/", None, PRIVATE_ALL, None)
    for folder in folders:
        _call("mount", os.fsencode(empty), os.fsencode(folder), None, BIND, None)


def what_stops(folders: Sequence[Path]) -> str:
    """Why they cannot be hidden here, as another process finds; "" where they can."""

    def try_it() -> str:
        try:
            with tempfile.TemporaryDirectory() as empty:
                hide(folders, Path(empty))
        except (OSError, AttributeError) as error:
            return str(error)
        return ""

    return _said_elsewhere(try_it)


def _call(name: str, *words: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} is refused: {os.strerror(number)}")


def _said_elsewhere(function: Callable[[], str]) -> str:
    """What `function` returns in a fork of this process, which it may change as it likes."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writes, function().encode(errors="replace")[:MOST_WORDS])
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    with os.fdopen(reads, "rb") as line:
        said = line.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    return said or ("it cannot be tried in another process" if status else "")
