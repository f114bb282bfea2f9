"""One rank under audit: its book begins with its process group, grows while it steps, and is completed at its end."""

import contextlib
import ctypes
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from cos598d.errors import one_line
from cos598d.terminal.files import write_json
from cos598d.tools.audit import script
from cos598d.tools.audit.book import Book
from cos598d.tools.audit.exchange import (
    STOPPED_SECONDS,
    WAIT_SECONDS,
    Counter,
    book_path,
    collect,
    earlier_worlds,
    remove_books,
)
from cos598d.tools.audit.options import Told
from cos598d.tools.audit.watch.observer import Observer
from cos598d.tools.audit.watch.writing import book_of
from cos598d.world.network import network_identity

_GRACE_SECONDS = 1.0  # that a Ctrl-C has to end the script by itself
_OTHERS_SECONDS = 2.0  # that other ranks have to write a book, before this one's end fails their calls
TIMEOUT = "--timeout"
_STORE_SECONDS = 1.0
_current: "Rank | None" = None
_is_installed = False


class Stops:
    """From `__init__` to `close`, calls `stopped` with what has asked the process to end: "SIGTERM", "SIGINT" or
    TIMEOUT, after so many `seconds`. Then the process ends by SIGTERM, unless the script has a handler of its own, or
    it was a Ctrl-C. For the main thread.

    Python calls a signal's handler when the main thread comes back from C++, which it never does in a hang. So a thread
    reads what Python writes into a socket at once when a signal comes.
    """

    def __init__(self, stopped: Callable[[str], None], seconds: float | None):
        self._stopped, self._pid, self._is_over = stopped, os.getpid(), threading.Event()
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = signal.getsignal(signal.SIGTERM)
        if self._before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._ask)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="cos598d audit").start()

    def close(self) -> None:
        """The script is over: signals are Python's again."""
        self._is_over.set()
        self.forget()

    def forget(self) -> None:
        """In a fork, too: what its signals are is not this process's."""
        signal.set_wakeup_fd(-1)
        if self._is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._ask

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Nothing to do: the thread does it."""

    def _watch(self) -> None:
        while not self._is_over.is_set():
            left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0)
            is_asked = bool(select.select([self._read], [], [], left)[0])
            numbers = self._read.recv(64) if is_asked else b""
            if self._is_over.is_set():
                return
            if not is_asked or signal.SIGTERM in numbers:
                self._deadline = None
                self._stopped("SIGTERM" if is_asked else TIMEOUT)
                if self._is_ours() or not is_asked:
                    time.sleep(_OTHERS_SECONDS)
                    _end_by(signal.SIGTERM)
            elif signal.SIGINT in numbers and not self._is_over.wait(_GRACE_SECONDS):
                self._stopped("SIGINT")


def _end_by(number: int) -> None:
    """End this process by a signal, from a thread that is not the main one."""
    default = ctypes.c_void_p(0)
    ctypes.CDLL(None).signal(number, default)
    os.kill(os.getpid(), number)


class Rank:
    """This process as a rank of an audited script. A fork of it is none, unless it is `carried`."""

    def __init__(self, told: Told):
        import torch.distributed as dist

        global _current, _is_installed  # noqa: PLW0603 - there is one script in a process
        self._dist, self.told, self._pid = dist, told, os.getpid()
        self._counter: Counter | None = None
        self._run, self._host_of_judge = told.run, ""
        self._place = (int(os.environ.get("RANK", "0") or 0), 1)
        self._earlier = 0  # worlds of the same command
        self.trouble = ""  # why the book could not be written
        self.say: Callable[[Rank, int], int] | None = None
        self._began = time.perf_counter()
        self.observer = Observer(told.steps, self._opened, self._keep)
        self.book: Book | None = None
        self._stops: Stops | None = None
        if threading.current_thread() is threading.main_thread():
            self._stops = Stops(self._stopped, told.seconds)
        if not _is_installed:
            _is_installed = True
            os.register_at_fork(after_in_child=_forget)
            _leave_a_book_at_exit()
        _current = self

    @property
    def number(self) -> int:
        """This rank's."""
        return self._place[0]

    def end(self, exit_code: int, error: str) -> None:
        """Complete the book after the script's end."""
        global _current  # noqa: PLW0603
        if _current is not self:
            return
        _current = None
        if self._stops is not None:
            self._stops.close()
        self.observer.look_for_group()
        self.observer.close()
        if self.book is not None and self.book["stopped"]:
            return  # what ends it now comes of that
        if self.observer.is_open:
            self._write(exit_code, error)
            self._send()

    def collect(self) -> None:
        """Rank 0, when its book is complete: wait for the others'."""
        if self.book is not None:
            seconds = STOPPED_SECONDS if self.book["stopped"] else WAIT_SECONDS
            collect(Path(self.told.folder), self.book, self._counter, seconds)

    def _opened(self) -> None:
        """There is a process group: who this is, and where rank 0's book will be."""
        dist = self._dist
        self._place = (dist.get_rank(), dist.get_world_size())
        with contextlib.suppress(AttributeError, ValueError, RuntimeError):
            self._counter = Counter(dist.distributed_c10d._get_default_store(), self.number)
        if self.number == 0:
            self._run = self._run or secrets.token_hex(8)
        if self._counter is not None:
            self._counter.tell(f"host/{self.number}", network_identity())
            if self.number == 0:
                self._counter.tell("run", self._run)
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
            self._write()

    def _stopped(self, by: str) -> None:
        """On a thread: the process is asked to end, and its main thread may wait in a call for good."""
        if _current is not self or not self.observer.is_open:
            return
        # The process may be waiting for the store.
        asking = threading.Thread(target=self._ask, daemon=True)
        asking.start()
        asking.join(_STORE_SECONDS)
        self._write(stopped=by)
        if self.say is not None:
            self.say(self, 128 + signal.SIGTERM)

    def _ask(self) -> None:
        """Ask the store who the run and its judge are, as soon as it can be known: at the end it may be gone, and torch
        would report that at length."""
        if self._counter is not None and not self._run:
            self._run = (self._counter.ask("run") or b"").decode("ascii", "replace")
        if self._counter is not None and not self.told.run and not self._host_of_judge:
            self._host_of_judge = (self._counter.ask("host/0") or b"").decode("ascii", "replace")

    def _write(self, exit_code: int | None = None, error: str = "", stopped: str = "") -> None:
        if not stopped:
            self._ask()
        about = {"run": self._run, "rank": self.number, "world_size": self._place[1], "host": network_identity()}
        about |= {"script": os.path.basename(self.told.script), "earlier": self._earlier}
        seconds = time.perf_counter() - self._began
        try:
            self.book = book_of(self.observer, about, seconds, exit_code, error, stopped)
            write_json(book_path(Path(self.told.folder), self.number), self.book)
        except (OSError, ValueError, RuntimeError) as wrong:
            self.trouble = f"the book of rank {self.number} could not be written: {one_line(wrong)}."

    def _send(self) -> None:
        """Send the book to rank 0 if that is on another host."""
        if self.number == 0 or self._counter is None or self.book is None:
            return
        if self._host_of_judge not in ("", self.book["host"]):
            with contextlib.suppress(RuntimeError, OSError):
                self._counter.send(book_path(Path(self.told.folder), self.number).read_text(encoding="utf-8"))


def begin(told: Told, say: Callable[["Rank", int], int] | None = None) -> Callable[[int, str], None]:
    """Make this process, which the script has started, a rank; what ends it is called with its exit code and error.
    Then `say`, if there is one, is called with the code."""
    rank = Rank(told)
    rank.say = say

    def end(exit_code: int, error: str) -> None:
        if is_under_audit():
            rank.end(exit_code, error)
            if say is not None:
                say(rank, exit_code)

    return end


def is_under_audit() -> bool:
    """Whether this process is a rank."""
    return _current is not None


def audit_script(told: Told, words: Sequence[str], say: Callable[[Rank, int], int]) -> int:
    """Run the script under observation, as this rank, and return the exit code that `say` returns for its own."""
    code = script.load(told.script)
    rank = Rank(told)
    rank.say = say
    # The ranks that it starts by itself do not judge: this process does, when they have ended.
    of_children = told if told.run else replace(told, run=secrets.token_hex(8))
    script.carry(of_children, begin)
    exit_code, error = script.run(code, told.script, words)
    rank.end(exit_code, error)
    return say(rank, exit_code)


def _forget() -> None:
    """In a fork of the process: what it does is not this rank's."""
    global _current  # noqa: PLW0603
    if _current is not None:
        _current.observer.failed = "a fork"
        with contextlib.suppress(Exception):
            if _current._stops is not None:
                _current._stops.forget()  # its signals are its own
            _current.observer.close()
    _current = None


def _leave_a_book_at_exit() -> None:
    """Let `os._exit`, which ends a process at once, complete the book first."""
    system: Any = os
    original = system._exit

    def leave(status: int) -> None:
        rank = _current
        if rank is not None and rank._pid == os.getpid():
            with contextlib.suppress(Exception):
                rank.end(status, "")
                status = rank.say(rank, status) if rank.say else status
        original(status)

    system._exit = leave
