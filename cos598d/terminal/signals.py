"""How a program reacts when it is asked to end: at once, or when the current work has ended well."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from cos598d.errors import UserError

# Signals that ask a program to end: a scheduler's two, and the terminal's.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))

# The exit code of a run that was asked to end, has saved its state, and can resume: EX_TEMPFAIL in BSD's sysexits.h.
GOES_ON = 75


def signal_name(number: int) -> str:
    """The name of a signal: "SIGKILL"; "signal 40" for one without a name, which can end a process too."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class AskedToEnd(UserError):
    """A signal has asked this program, and the programs that it runs, to end."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal_name(number)}.")
        self.exit_code = 128 + number


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

    Schedulers repeat theirs, so further ones are noted too. But a Ctrl-C that is not the first raises KeyboardInterrupt
    at once. Signals that were ignored before stay ignored. If the first `is_met` when the context ends, further signals
    except a Ctrl-C are ignored from then on: the process ends with its state saved. Use one, on the main thread.
    """

    is_met = False

    def __init__(self) -> None:
        self.first: signal.Signals | None = None

    def __enter__(self) -> "Requests":
        self._before = {number: signal.getsignal(number) for number in ENDING}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.is_met and number != signal.SIGINT else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.first is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.first = self.first or signal.Signals(number)
