"""How the books of all ranks come together: as JSON in a folder, which several hosts have to share.

No collective call is made for it: ranks that step unequally would hang in one. Nothing is unpickled.
"""

import contextlib
import time
from pathlib import Path

import psutil

from cos598d.errors import UserError, first_line
from cos598d.tools.audit.book import BOOK, BOOKS, ENDED, Book, read_book

WAIT_SECONDS = 60.0  # for ranks that are still about to end
_POLL_SECONDS = 0.05


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


def collect(folder: Path, book: Book) -> None:
    """On rank 0: wait until the other ranks' books are complete, but not for processes that have ended."""
    waiting = set(range(1, book["world_size"]))
    deadline = time.monotonic() + WAIT_SECONDS
    while waiting and time.monotonic() < deadline:
        for rank in sorted(waiting):
            if _is_there(folder, rank, book):
                waiting.discard(rank)
        time.sleep(_POLL_SECONDS if waiting else 0)


def _is_there(folder: Path, rank: int, own: Book) -> bool:
    with contextlib.suppress(UserError, OSError):
        book = read_book(book_path(folder, rank), rank)
        is_dead = book["host"] == own["host"] and not _runs(book["pid"])
        return book["run"] == own["run"] and (book["state"] == ENDED or is_dead)
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
