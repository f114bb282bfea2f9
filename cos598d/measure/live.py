"""Rows that can be read while a run goes on and that outlive it: files in the run's folder `live/`."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from cos598d.records.live import (
    ATTEMPTS,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EPOCHS,
    EVALUATIONS,
    LIVE,
    ROWS,
    SETTING,
)
from cos598d.terminal.files import is_named, names_errors, open_own, remove_known, sync_to_disk, whole_file
from cos598d.terminal.reading import open_plain

# A disk that is full now may not be so soon, as when a checkpoint that did not fit is taken away again.
FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 16 * 2**20  # bytes of rows that wait for room
LONGEST_ROW = 16 * 2**20  # bytes
# What a run writes into `live/`: of all its ranks, and what rank 0 writes beside rows.
ALL_ROWS = (*(name.format(rank="[0-9]*") for name in ROWS), EPOCHS, EVALUATIONS)
FACTS = (ATTEMPTS, SETTING, CONFIG_FILE, ENVIRONMENT_FILE)


def clear(folder: Path) -> None:
    """Take away what a run that did not end well left in `folder`, and nothing else.

    For a run that begins anew: each of its ranks calls it, before any of them makes its files.
    """
    if was_left(folder):
        with contextlib.suppress(OSError):  # what cannot be removed is overwritten
            remove_known(folder / LIVE, (*ALL_ROWS, *FACTS))


def was_left(folder: Path) -> bool:
    """Whether a run that did not end well has left its rows in `folder`, or what was to become some."""
    try:
        names = os.listdir(folder / LIVE)
    except OSError:
        return False
    return not names or any(is_named(name, (*ALL_ROWS, ATTEMPTS, SETTING)) for name in names)


class LiveFile:
    """A text file of whole rows that grows: each write goes to the system at once, so that it outlives the process.

    Opened, it keeps the first `begin` bytes of a file that is there, which must be a plain one (see `open_own`). While
    the disk is full what is written waits in memory, up to MOST_WAITING bytes; then, and in `complete`, that is an
    OSError. Every OSError names `path`. Threads may share it.
    """

    def __init__(self, path: Path, begin: int = 0):
        self.path = path
        self._lock = threading.Lock()
        self._waiting = b""
        with names_errors(self.path):
            self._descriptor = open_own(path)
            os.ftruncate(self._descriptor, begin)
            self._size = os.lseek(self._descriptor, 0, os.SEEK_END)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been written yet."""
        return self.size == 0

    @property
    def size(self) -> int:
        """Bytes of all rows so far, those that wait among them."""
        with self._lock:
            return self._size + len(self._waiting)

    def write(self, text: str) -> None:
        """Add to its end: whole rows."""
        with self._lock, names_errors(self.path):
            self._waiting += text.encode()
            try:
                self._hand_over()
            except OSError as error:
                if error.errno not in FULL or len(self._waiting) > MOST_WAITING:
                    raise

    def writelines(self, lines: Iterable[str]) -> None:
        """Add to its end."""
        self.write("".join(lines))

    def replace_last(self, size: int, text: str) -> None:
        """Put `text`, a whole row, in the place of the last row, of `size` bytes."""
        with self._lock, names_errors(self.path):
            kept = max(0, len(self._waiting) - size)
            self._size -= size - (len(self._waiting) - kept)
            self._waiting = self._waiting[:kept]
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
        self.write(text)

    def complete(self) -> None:
        """Bring all of it to the disk: one that is full raises here at the latest. Others may write meanwhile."""
        with names_errors(self.path):
            with self._lock:
                self._hand_over()
                descriptor = os.dup(self._descriptor)
            try:
                sync_to_disk(descriptor)  # over a network, or with a quota, a full disk raises only here
            finally:
                os.close(descriptor)

    def publish(self, target: Path) -> None:
        """Give it the name `target`, in place of an older file. Nothing may be written after this."""
        self.complete()
        with names_errors(self.path):
            os.replace(self.path, target)

    def close(self) -> None:
        """Close it. What could not be written yet is lost."""
        with self._lock, contextlib.suppress(OSError):
            if self._descriptor >= 0:
                try:
                    self._hand_over()
                finally:
                    os.close(self._descriptor)
                    self._descriptor = -1

    def _hand_over(self) -> None:
        """Give the system what waits, as far as the disk takes it."""
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            self._size += written
            self._waiting = self._waiting[written:]


def take_up(path: Path, size: int, others: Iterable[Path]) -> int:
    """Bring the first `size` bytes of a file of rows to `path`, and return how many bytes of them are there.

    They are what stands there already, else a copy from the first of `others` that has them. Where none has them all,
    what whole rows `path` has; of a file of another run, that is found by its rows not ending there, none. Of a file
    that has a name elsewhere too, `path` becomes a copy.
    """
    for place in (path, *others):
        if _has_rows(place, size):
            if place != path or place.stat().st_nlink > 1:
                _copy(place, path, size)
            return size
    found = _whole_rows(path, size)
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        _copy(path, path, found)
    return found


def last_row(path: Path, end: int) -> bytes:
    """The row of a file that ends at byte `end`. Raises OSError, also where it is longer than any row of ours."""
    with open_plain(path, "rb", follows=False) as rows:
        size, found = 2**12, b""
        while True:
            begin = max(0, end - size)
            rows.seek(begin)
            found = rows.read(end - begin)
            place = found.rfind(b"\n", 0, len(found) - 1)
            if place >= 0 or begin == 0:
                return found[place + 1 :]
            if size > LONGEST_ROW:
                raise OSError(errno.EFBIG, "it has a row of another program", str(path))
            size *= 4


def _copy(source: Path, path: Path, size: int) -> None:
    """Bring the first `size` bytes of a file of rows to the disk as a new file `path`."""
    with open_plain(source, "rb", follows=False) as rows, whole_file(path, "wb") as target:
        left = size
        while part := rows.read(min(left, 2**20)):
            target.write(part)
            left -= len(part)
        target.flush()
        sync_to_disk(target.fileno())


def _has_rows(path: Path, size: int) -> bool:
    """Whether a file has so many bytes, and a row ends there."""
    try:
        with open_plain(path, "rb", follows=False) as rows:
            if os.fstat(rows.fileno()).st_size < size:
                return False
        return size == 0 or last_row(path, size).endswith(b"\n")
    except OSError:
        return False


def _whole_rows(path: Path, most: int) -> int:
    """Bytes of the whole rows among the first `most` of a file, which is shorter; 0 where they do not fit."""
    try:
        size = path.stat().st_size
        if size >= most or size == 0:
            return 0
        row = last_row(path, size)
    except OSError:
        return 0
    return size if row.endswith(b"\n") else size - len(row)
