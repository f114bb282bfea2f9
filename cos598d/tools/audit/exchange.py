"""How the books of all ranks come together: through a folder on one host, through the ranks' own store between hosts.

No collective call is made for it: ranks that step unequally would hang in one. Nothing is unpickled: a book travels as
compressed JSON.
"""

import contextlib
import time
import zlib
from pathlib import Path
from typing import Any

import psutil

from cos598d.errors import UserError, first_line
from cos598d.terminal.files import write_whole
from cos598d.tools.audit.book import BOOK, BOOKS, ENDED, MOST_BYTES, Book, read_book

WAIT_SECONDS = 60.0  # for ranks that are still about to end
_POLL_SECONDS = 0.05
_PREFIX = "cos598d_audit"


def book_path(folder: Path, rank: int) -> Path:
    """Where a rank's book is."""
    return folder / BOOKS / BOOK.format(rank=rank)


def _books(folder: Path) -> dict[int, Path]:
    paths = (folder / BOOKS).glob("rank*.json")
    return {int(path.stem[4:]): path for path in paths if path.stem[4:].isdigit() and len(path.stem) < 12}


def remove_books(folder: Path, world_size: int = 0) -> None:
    """Remove an earlier audit's books of the ranks from `world_size` on, which this audit does not overwrite."""
    for rank, path in _books(folder).items():
        if rank >= world_size:
            path.unlink(missing_ok=True)


def earlier_worlds(folder: Path, run: str) -> int:
    """How many worlds the command of this `run` has opened before, by rank 0's book of the last one."""
    with contextlib.suppress(UserError, OSError):
        book = read_book(book_path(folder, 0), 0)
        return book.get("earlier", 0) + 1 if book["run"] == run else 0
    return 0


class Counter:
    """The store by which the script's ranks met, as far as the audit uses it: what was set is read, and none waits."""

    def __init__(self, store: Any, rank: int):
        self._store, self.rank = store, rank

    def tell(self, name: str, value: str | bytes) -> None:
        """Set a value for all ranks."""
        self._store.set(f"{_PREFIX}/{name}", value)

    def ask(self, name: str) -> bytes | None:
        """A value that a rank has set; None if none has, or if the store has ended."""
        try:
            if self._store.check([f"{_PREFIX}/{name}"]):
                return bytes(self._store.get(f"{_PREFIX}/{name}"))
        except (RuntimeError, OSError):  # torch's own errors of a lost store are RuntimeErrors
            pass
        return None

    def send(self, text: str) -> None:
        """Send this rank's book to rank 0 on another host."""
        self.tell(f"book/{self.rank}", zlib.compress(text.encode()))

    def receive(self, rank: int) -> bytes | None:
        """The book that a rank has sent; None if it has sent none. Raises UserError for a damaged one."""
        data = self.ask(f"book/{rank}")
        if data is None:
            return None
        reader = zlib.decompressobj()
        with contextlib.suppress(zlib.error):
            book = reader.decompress(data, MOST_BYTES)
            if reader.eof:
                return book
        raise UserError(f"the results of rank {rank} did not arrive complete. Audit the script again.")


def collect(folder: Path, book: Book, counter: Counter | None) -> None:
    """On rank 0: wait until the other ranks' books are complete, but not for processes that have ended."""
    waiting = set(range(1, book["world_size"]))
    deadline = time.monotonic() + WAIT_SECONDS
    while waiting and time.monotonic() < deadline:
        for rank in sorted(waiting):
            if _is_there(folder, rank, book, counter):
                waiting.discard(rank)
        time.sleep(_POLL_SECONDS if waiting else 0)


def _is_there(folder: Path, rank: int, own: Book, counter: Counter | None) -> bool:
    path = book_path(folder, rank)
    if path.exists():
        with contextlib.suppress(UserError, OSError):
            book = read_book(path, rank)
            if book["run"] == own["run"]:
                is_dead = book["host"] == own["host"] and not _runs(book["pid"])
                return book["state"] == ENDED or is_dead
    if counter is not None:
        with contextlib.suppress(UserError):
            data = counter.receive(rank)
            if data is not None:
                write_whole(path, data)
                return True
    return False


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def read_books(folder: Path) -> tuple[list[Book], list[str]]:
    """The books of one run in a folder, by rank, and remarks on those that are missing or cannot be read.

    The run is that of the lowest rank with a book. Raises UserError if there is no book.
    """
    paths = _books(folder)
    books: list[Book] = []
    remarks: list[str] = []
    for rank in sorted(paths):
        try:
            book = read_book(paths[rank], rank)
        except UserError as error:
            remarks.append(str(error))
            continue
        except OSError as error:
            remarks.append(f"{paths[rank]} cannot be read: {first_line(error)}.")
            continue
        if books and (book["run"], book["world_size"]) != (books[0]["run"], books[0]["world_size"]):
            remarks.append(f"{paths[rank]} is of another run of the script: it was left out.")
            continue
        books.append(book)
    if not books:
        if remarks:
            raise UserError(remarks[0])
        raise UserError(f"{folder} has no results of a rank. Give the folder of an audit, or a script.")
    return books, remarks
