"""What a program does when it is asked to end: at once, or when what is under way has come to a good end."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

# What asks a program to end: a scheduler's two, and the terminal's.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))

# The exit code of a run that was asked to end, has saved what it had, and can go on: EX_TEMPFAIL in BSD's sysexits.h.
GOES_ON = 75


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 40" of one that has no name, which a process may be ended by all the same."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt, so that every `finally` runs."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Requests:
    """Signals of ENDING as requests: within the context the first is only noted, as `first`, and nothing ends.

    Schedulers repeat theirs, so a further one is noted too; but a Ctrl-C that is not the first raises KeyboardInterrupt
    at once. What ignored a signal before goes on ignoring it. Where the first `is_met` when the context ends, further
    ones but a Ctrl-C are ignored from then on: the process leaves with what it has saved. One at a time; for the main
    thread.
    """

    is_met = False

    _current: "Requests | None" = None

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._is_heard = False

    def __enter__(self) -> "Requests":
        self._before = {number: signal.getsignal(number) for number in ENDING}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._note)
        Requests._current = self
        return self

    def __exit__(self, *_: Any) -> None:
        Requests._current = None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.is_met and number != signal.SIGINT else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.first is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.first = self.first or signal.Signals(number)

    def _hear(self, number: int) -> bool:
        is_obeyed = self._is_heard and number == signal.SIGINT
        self._is_heard = True
        return not is_obeyed


def is_noted(number: int) -> bool:
    """Whether a signal that has just come is only noted. To be asked once for each that comes, by one thread.

    That thread hears of every one. Python calls the handler on the main thread, and for two that come while that is
    held by a long call it does so once.
    """
    current = Requests._current
    return current is not None and current._hear(number)
