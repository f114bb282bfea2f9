"""Rows that can be read while a run goes on and that outlive it: files in the run's folder `live/`."""

import contextlib
import errno
import fnmatch
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from cos598d.files import sync_to_disk, whole_file
from cos598d.records.live import ATTEMPTS, EPOCHS, EVALUATIONS, LIVE, ROWS, SETTING

# A disk that is full now may not be so soon, as when a checkpoint that did not fit is taken away again.
FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 16 * 2**20  # bytes of rows that wait for room


def clear(folder: Path) -> None:
    """Take away what a run that did not end well left in `folder`.

    For a run that begins anew: each of its ranks calls it, before any of them makes its files.
    """
    if was_left(folder):
        shutil.rmtree(folder / LIVE, ignore_errors=True)


def was_left(folder: Path) -> bool:
    """Whether a run that did not end well has left its rows in `folder`, or what was to become some."""
    try:
        names = os.listdir(folder / LIVE)
    except OSError:
        return False
    known = [name.format(rank="*") for name in (*ROWS, ATTEMPTS, SETTING, EPOCHS, EVALUATIONS)]
    return not names or any(fnmatch.fnmatchcase(name, one) for name in names for one in known)


class LiveFile:
    """A text file of whole rows that grows: each write goes to the system at once, so that it outlives the process.

    Opened, it keeps the first `begin` bytes of a file that is there. While the disk is full what is written waits in
    memory, up to MOST_WAITING bytes; then, and in `complete`, that is an OSError. Every OSError names `path`. Threads
    may share it.
    """

    def __init__(self, path: Path, begin: int = 0):
        self.path = path
        self._lock = threading.Lock()
        self._waiting = b""
        with self._named():
            self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
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
        with self._lock, self._named():
            self._waiting += text.encode()
            try:
                self._hand_over()
            except OSError as error:
                if error.errno not in FULL or len(self._waiting) > MOST_WAITING:
                    raise

    def writelines(self, lines: Iterable[str]) -> None:
        """Add to its end."""
        self.write("".join(lines))

    def complete(self) -> None:
        """Bring all of it to the disk: one that is full raises here at the latest. Others may write meanwhile."""
        with self._named():
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
        with self._named():
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

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path), None
            raise


def take_up(path: Path, size: int, others: Iterable[Path]) -> int:
    """Bring the first `size` bytes of a file of rows to `path`, and return how many bytes of them are there.

    They are what stands there already, else a copy from the first of `others` that has them. Where none has them all,
    what whole rows `path` has; of a file of another run, that is found by its rows not ending there, none.
    """
    if _has_rows(path, size):
        return size
    for other in others:
        if _has_rows(other, size):
            with other.open("rb") as source, whole_file(path, "wb") as target:
                left = size
                while part := source.read(min(left, 2**20)):
                    target.write(part)
                    left -= len(part)
                target.flush()
                sync_to_disk(target.fileno())
            return size
    return _whole_rows(path, size)


def last_row(path: Path, end: int) -> bytes:
    """The row of a file that ends at byte `end`."""
    with path.open("rb") as rows:
        size, found = 2**12, b""
        while True:
            begin = max(0, end - size)
            rows.seek(begin)
            found = rows.read(end - begin)
            place = found.rfind(b"\n", 0, len(found) - 1)
            if place >= 0 or begin == 0:
                return found[place + 1 :]
            size *= 4


def _has_rows(path: Path, size: int) -> bool:
    """Whether a file has so many bytes, and a row ends there."""
    try:
        if path.stat().st_size < size:
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
