"""Locks on folders: one program at a time uses a folder. The kernel drops the lock when the program ends."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# A program that only checks whether a folder is locked holds a lock of its own for some microseconds.
TRIES, PAUSE_SECONDS = 5, 0.1


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock `folder` for the block. Yields whether it worked: not if another program has locked it.

    The lock is on the folder itself. Nothing is left in it, and the kernel drops the lock when this process ends. On a
    file system without locks, such as some network ones, two programs at once are not detected.
    """
    if fcntl is None:
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not left:
                    yield False
                    return
                time.sleep(PAUSE_SECONDS)
            except OSError:
                break  # without locks
            else:
                break
        yield True
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a program has locked `folder`, if its file system supports locks."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
