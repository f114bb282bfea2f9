"""A process that is asked to end while it waits in a call: a thread writes its book.

Python calls a signal's handler when the main thread comes back from C++, which it never does in a hang. What Python
writes into a socket at once when a signal comes is read here.
"""

import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

_GRACE_SECONDS = 1.0  # that a Ctrl-C has to end the script by itself
_OTHERS_SECONDS = 2.0  # that other ranks have to write a book, before this one's end fails their calls
TIMEOUT = "--timeout"


class Stops:
    """From `__init__` to `close`, calls `stopped` with what has asked the process to end: "SIGTERM", "SIGINT" or
    TIMEOUT, after so many `seconds`. Then the process ends by SIGTERM, unless the script has a handler of its own, or
    it was a Ctrl-C. For the main thread."""

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
