"""Folders that a submission's processes find empty: an empty one is mounted over each, for them alone (Linux)."""

import ctypes
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cos598d.tools.check.supervisor import prctl
from cos598d.tools.grade.processes import SET_DUMPABLE

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000  # unshare(2)
BIND, PRIVATE_ALL = 0x1000, 0x44000  # mount(2)


def hide(folders: Sequence[Path], empty: Path) -> None:
    """From now on this process, and all that it starts, finds what is in `empty` in each of the folders.

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
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with tempfile.TemporaryDirectory() as empty:
                hide(folders, Path(empty))
        except (OSError, AttributeError) as error:
            os.write(writes, str(error).encode(errors="replace")[:200])
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as line:
        said = line.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return said


def _call(name: str, *words: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} is refused: {os.strerror(number)}")
