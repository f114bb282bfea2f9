"""One rank under audit: its book begins with its process group, grows while it trains, and is completed at its end."""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cos598d.errors import one_line
from cos598d.terminal.files import write_json
from cos598d.tools.audit.book import Book
from cos598d.tools.audit.exchange import book_path, collect, earlier_worlds, remove_books
from cos598d.tools.audit.options import Told
from cos598d.tools.audit.watch.observer import Observer
from cos598d.tools.audit.watch.writing import book_of
from cos598d.world.network import network_identity

_TICK_SECONDS = 2.0  # between two books of a rank that trains, or hangs
_RUN = "cos598d_audit/run"  # in the store
_current: "Rank | None" = None
_is_installed = False


class Rank:
    """This process as a rank of an audited script. A fork of it is none.

    `say` is called at its end with its exit code, and returns the one that the process is to have.
    """

    def __init__(self, told: Told, say: "Callable[[Rank, int], int] | None"):
        import torch.distributed as dist

        global _current, _is_installed  # noqa: PLW0603 - there is one script in a process
        self._dist, self.told, self._say, self._pid = dist, told, say, os.getpid()
        self._store: Any = None  # by which the script's ranks met
        self._run = told.run
        self._place = (int(os.environ.get("RANK", "0") or 0), 1)
        self._earlier = 0  # worlds of the same command
        self._calls = -1  # that were made until the last tick
        self._writes = threading.Lock()
        self.trouble = ""  # why the book could not be written
        self._began = time.perf_counter()
        self.observer = Observer(told.steps, self._opened, self._keep)
        self.book: Book | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._tick, daemon=True, name="cos598d audit").start()
        if not _is_installed:
            _is_installed = True
            os.register_at_fork(after_in_child=_forget)
            _leave_a_book_at_exit()
        _current = self

    @property
    def number(self) -> int:
        """This rank's."""
        return self._place[0]

    def end(self, exit_code: int, error: str) -> int:
        """Complete the book after the script's end, and return the exit code that `say` returns."""
        global _current  # noqa: PLW0603
        if _current is not self:
            return exit_code
        _current = None
        self._is_over.set()
        self.observer.guard(self.observer.open)()
        self.observer.close()
        if self.observer.is_open:
            self._write(exit_code, error)
        return self._say(self, exit_code) if self._say else exit_code

    def collect(self) -> None:
        """Rank 0, when its book is complete: wait for the others'."""
        if self.book is not None:
            collect(Path(self.told.folder), self.book)

    def _opened(self) -> None:
        """There is a process group: who this is, and where rank 0's book will be."""
        dist = self._dist
        self._place = (dist.get_rank(), dist.get_world_size())
        with contextlib.suppress(AttributeError, ValueError, RuntimeError):
            self._store = dist.distributed_c10d._get_default_store()
        if self.number == 0 and not self._run:
            self._run = secrets.token_hex(8)
            if self._store is not None:
                self._store.set(_RUN, self._run)
        folder = Path(self.told.folder)
        with contextlib.suppress(OSError):
            if self.number == 0 and self.told.run:
                self._earlier = earlier_worlds(folder, self.told.run)
            book_path(folder, self.number).unlink(missing_ok=True)
            if self.number == 0:  # an earlier world may have been larger
                remove_books(folder, self._place[1])

    def _keep(self) -> None:
        """Write a book of what was seen so far, in case the process is killed."""
        if self.observer.is_open:
            self._ask()
            self._write()

    def _tick(self) -> None:
        """On a thread: write what was seen so far, but not in the middle of an examined step, unless it hangs there."""
        while not self._is_over.wait(_TICK_SECONDS):
            calls, self._calls = self._calls, self.observer.recent.count
            if self.observer.is_open and (calls == self._calls or not self.observer.steps.is_examined):
                self._write()

    def _ask(self) -> None:
        """Ask the store which run this is, as soon as it can be known: at the end it may be gone, and torch would
        report that at length."""
        if self._store is not None and not self._run:
            with contextlib.suppress(RuntimeError, OSError):  # torch's own errors of a lost store are RuntimeErrors
                if self._store.check([_RUN]):
                    self._run = bytes(self._store.get(_RUN)).decode("ascii", "replace")

    def _write(self, exit_code: int | None = None, error: str = "") -> None:
        about = {"run": self._run, "rank": self.number, "world_size": self._place[1], "host": network_identity()}
        about |= {"script": os.path.basename(self.told.script), "earlier": self._earlier}
        with self._writes:
            try:
                self.book = book_of(self.observer, about, time.perf_counter() - self._began, exit_code, error)
                write_json(book_path(Path(self.told.folder), self.number), self.book)
            except (OSError, ValueError, RuntimeError) as wrong:
                if exit_code is not None:  # until then what is written can change meanwhile
                    self.trouble = f"the book of rank {self.number} could not be written: {one_line(wrong)}."


def begin(told: Told, say: Callable[[Rank, int], int] | None) -> Rank | None:
    """Make this process a rank; None if it is one already."""
    return Rank(told, say) if _current is None else None


def _forget() -> None:
    """In a fork of the process: what it does is not this rank's."""
    global _current  # noqa: PLW0603
    if _current is not None:
        _current.observer.failed = "a fork"
        with contextlib.suppress(Exception):
            _current.observer.close()
    _current = None


def _leave_a_book_at_exit() -> None:
    """Let `os._exit`, which ends a process at once, complete the book first."""
    system: Any = os
    exit_at_once = os._exit

    def leave(status: int) -> None:
        rank = _current
        if rank is not None and rank._pid == os.getpid():
            with contextlib.suppress(Exception):
                status = rank.end(status, "")
        exit_at_once(status)

    system._exit = leave
