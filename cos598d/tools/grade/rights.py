"""What a submission's processes may: where the grader is root they have the rights of the user nobody, if that works;
they find folders empty that they must not read; and of those that are judged at the same time none meets another."""

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import pwd
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cos598d.tools.check.supervisor import SET_PARENT_DEATH_SIGNAL, prctl
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.processes import SET_DUMPABLE, hide_this_process, scratch_base

NOBODY = "nobody"
SET_NO_NEW_PRIVILEGES = 38  # prctl(2)
NEW_MOUNTS, NEW_CALLS, NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
BIND, BIND_ALL, PRIVATE_ALL = 0x1000, 0x5000, 0x44000  # mount(2)
SET_FLAGS, UP = 0x8914, 1  # netdevice(7)
OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev/shm")  # where every user may write
FIRST_UID = 61184  # of the users that systemd gives to services for a while, as nobody's in parallel
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
    With it, where they are the grader's own, a sentence that says why.
    """
    if os.geteuid() != 0:
        return None, "Submissions run with your rights: they can read and change your files and the results."
    try:
        found = pwd.getpwnam(NOBODY)
        user = User(found.pw_uid, found.pw_gid)
        why = _said_elsewhere(lambda: _unread_by(user, needed))
    except KeyError:
        why = f"There is no user {NOBODY}"
    if not why:
        return user, ""
    return None, (
        f"{why}, so submissions can only run as root: they can end the grader, change its results and read all files."
    )


def needed_by(assignment: Assignment) -> list[str]:
    """What submissions of this assignment have to find: Python, packages and what it names."""
    specs = [importlib.util.find_spec(name) for name in IMPORTED]
    named = [os.environ.get(name, "") for name in assignment.environment]
    return [
        sys.executable,
        os.__file__,
        *(spec.origin for spec in specs if spec and spec.origin),
        *(path for path in named if os.path.exists(path)),
    ]


def _unread_by(user: User, needed: Sequence[str]) -> str:
    """Become this user, and say what of `needed` is unreadable then, or why that is refused; "" where all is well."""
    resolved = {path: os.path.realpath(path) for path in needed}  # now, since this user may be unable to
    try:
        user.become()
    except OSError as error:
        return f"No process can become {NOBODY}'s ({error.strerror})"
    for path, target in resolved.items():
        if not os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK):
            above = [folder for each in (path, target) for folder in reversed(Path(os.path.abspath(each)).parents)]
            first = next((folder for folder in above if not os.access(folder, os.X_OK)), None)
            return f"The user {NOBODY} cannot read {f'{first}, which has {target}' if first else path}"
    return ""


def hide(folders: Sequence[Path], empty: Path) -> None:
    """From now on this process, and all that it starts, finds what is in `empty` in each of the folders (Linux).

    Who is not root becomes the owner of mounts for it, until the next program is started. Raises OSError.
    """
    if not folders:
        return
    _unshare(NEW_MOUNTS)
    for folder in folders:
        _mount(empty, folder)


@dataclass(frozen=True)
class OwnNamespaces:
    """Namespaces of its own for each submission (Linux): it meets no process, port or temporary file of another.

    `needed` are the files that it has to find where they are; `slot` is its place among those judged at the same time.
    """

    needed: tuple[str, ...]
    slot: int = 0

    def user(self, user: User | None) -> User | None:
        """Another user for each slot, since the kernel counts all processes of one together; None stays None."""
        return user and replace(user, uid=FIRST_UID + self.slot)

    @property
    def shared(self) -> list[Path]:
        """Folders for temporary files that stay shared, since something needed is in them."""
        return [place for place in _open_places() if any(place in Path(path).parents for path in self.needed)]

    def enter(self, scratch: Path, user: User | None) -> None:
        """Return in a new process of new namespaces, whose temporary folders are below `scratch`. Raises OSError.

        The calling process waits for it, and ends as it does. All that it starts ends with it.
        """
        _unshare(NEW_MOUNTS | NEW_CALLS | NEW_PROCESSES | NEW_NETWORK)
        hide_this_process()
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _go_on_in_a_child(is_first=False)
        # This is the namespace's first process: when it ends, the kernel ends all others.
        _call("mount", b"proc", b"/proc", b"proc", 0, None)
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh22x", b"lo", UP))
        own = scratch / "tmp"
        own.mkdir(exist_ok=True)
        if user:
            os.chown(own, user.uid, user.gid)
        for place in _open_places():
            if place not in self.shared:
                if place in scratch.parents:
                    (own / scratch.relative_to(place)).mkdir(parents=True, exist_ok=True)
                    _mount(scratch, own / scratch.relative_to(place))
                _mount(own, place, BIND_ALL)
        _go_on_in_a_child(is_first=True)


def what_stops(try_it: Callable[[Path], None]) -> str:
    """Why `try_it` fails here, as another process with an empty folder finds; "" where it works."""

    def words() -> str:
        try:
            try_it(Path(empty).resolve())
        except (OSError, AttributeError) as error:
            return str(error)
        return ""

    with tempfile.TemporaryDirectory() as empty:
        return _said_elsewhere(words)


def _open_places() -> list[Path]:
    """The folders in which submissions could find files of others."""
    places = [Path(os.path.realpath(place)) for place in OPEN_TO_ALL if os.path.isdir(place)]
    base = Path(os.path.realpath(scratch_base()))
    return places if any(place in (base, *base.parents) for place in places) else [*places, base]


def _unshare(kinds: int) -> None:
    """Leave these namespaces for new ones; mounts are among them. Who is not root leaves that of the users too."""
    ids = (os.getuid(), os.getgid())
    if os.geteuid() == 0:
        _call("unshare", kinds)
    else:
        _call("unshare", kinds | NEW_USERS)
        prctl(SET_DUMPABLE, 1)  # else the next files are root's
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), ids, strict=True):
            Path("/proc/self", name).write_text(f"{number} {number} 1")
    _call("mount", None, b"/", None, PRIVATE_ALL, None)


def _mount(folder: Path, place: Path, how: int = BIND) -> None:
    """Have what is in `folder` found in `place`."""
    _call("mount", os.fsencode(folder), os.fsencode(place), None, how, None)


def _go_on_in_a_child(is_first: bool) -> None:
    """Return in a child. This process waits for it, and ends as it does; the first of a namespace waits for orphans
    too, and says by its exit code what the signal was, since none ends it."""
    pid = os.fork()
    if pid == 0:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the grader
    ended = 0
    while ended != pid:
        ended, status = os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    if not is_first and code > 128:
        with contextlib.suppress(OSError):  # of signals that cannot be handled
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    os._exit(code if code >= 0 else 128 - code)


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
