"""The limits of a submission's processes, and the end of all of them, even if they left group, session or parent."""

import contextlib
import fcntl
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from cos598d.terminal.locks import locked
from cos598d.tools.check.supervisor import SET_CHILD_SUBREAPER, prctl
from cos598d.tools.grade.assignment import Limits

SCRATCH = "cos598d-grade-"  # begins the names of scratch folders, and of no others
THREADS_EACH = 16  # that one process may have, on average
LONGEST_BASE = 32  # characters: sockets are made below it, whose paths have at most 107
MOST_LOOKED_AT = 200_000  # files, when a folder's size is added up
SET_DUMPABLE = 4  # prctl(2)


@contextlib.contextmanager
def orphans_come_here() -> Iterator[None]:
    """Within it, processes below this one whose parent ends become its children (Linux), so that none is lost."""
    prctl(SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(SET_CHILD_SUBREAPER, 0)


def hide_this_process() -> None:
    """From now on no process but root's looks into this one's memory, variables or descriptors (Linux)."""
    prctl(SET_DUMPABLE, 0)


def scratch_base() -> str:
    """Where scratch folders are made."""
    base = tempfile.gettempdir()
    return base if len(base) <= LONGEST_BASE else "/tmp"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that is deleted afterwards, whatever a submission has put there. It is locked until then."""
    new = Path(tempfile.mkdtemp(prefix=f".{SCRATCH}", dir=scratch_base())).resolve()
    with locked(new):
        path = new.rename(new.with_name(new.name[1:]))
        try:
            yield path
        finally:
            _remove(path)


def remove_left_folders() -> None:
    """Delete the scratch folders of graders that were killed: nobody has locked them any more.

    What a submission has left may still run and change them. So nothing there is followed, and root changes no rights.
    """
    for path in Path(scratch_base()).glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # it is no folder, another user's, locked, or cannot be locked at all
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path, is_ours=os.geteuid() != 0)
            finally:
                os.close(descriptor)


def _remove(path: Path, is_ours: bool = True) -> None:
    """Delete a folder; one that `is_ours` with what may not be read in it."""
    # Python's own removal stops at folders that are nested deeply, or may not be read.
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"])[0 if is_ours else 1 :]:
        with contextlib.suppress(OSError):
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(path, ignore_errors=True)


def limit_this_process(limits: Limits) -> None:
    """From now on, limit the memory, file sizes, processes and seconds of this process and of all that it starts."""
    seconds = int(2 * limits.seconds_in_all) + 60  # of processor; the clock on the wall is the grader's to look at
    _set(resource.RLIMIT_CPU, seconds)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_FSIZE, limits.file_mb << 20)
    _set(resource.RLIMIT_AS, limits.memory_mb << 20)
    if os.getuid() != 0:  # the kernel counts all of a user's, and does not hold root to it
        _set(resource.RLIMIT_NPROC, _tasks_of_user() + THREADS_EACH * limits.processes)


def _set(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def _tasks_of_user() -> int:
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += process.num_threads() if process.uids().real == os.getuid() else 0
    return found


def megabytes_in(folder: Path) -> float:
    """The size of a folder on the disk in MB; infinite if it has more than MOST_LOOKED_AT files."""
    found, files, folders = 0, 0, [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    found += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                if files > MOST_LOOKED_AT:
                    return float("inf")
    return found / (1 << 20)
