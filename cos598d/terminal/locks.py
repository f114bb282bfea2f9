"""A folder that one program has for itself while it runs, and whether one has it: the kernel forgets no lock."""

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

# Who only looks whether a folder is locked has a lock of his own on it for some microseconds.
TRIES, PAUSE_SECONDS = 5, 0.1


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock `folder` while the block runs, which is told whether it may: not where another program has locked it.

    The lock is on the folder itself: nothing is left in it, and the kernel lets go when this process ends. On a file
    system without locks, such as some networks', two programs at once are not told.
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
    """Whether a program has locked `folder`, as far as its file system tells."""
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
