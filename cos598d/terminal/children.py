"""Processes that this one has started: waited for together, and ended together with what they have started.

Whoever starts several of which none is of use without the others (the ranks of a run, the programs of emulated hosts)
waits for them here: a failed one ends the rest, after some seconds in which they may say what they noticed.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

POLL_SECONDS = 0.05
FORCED_SECONDS = 5.0  # how long a killed process may take to be gone


class Child(Protocol):
    """A started process, such as a Popen.

    `poll` gives its exit code, -N where signal N ended it, and None while it runs.
    """

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...


def exit_code_of(code: int) -> int:
    """The exit code of a process that has ended, as a shell gives it: 128 + N where signal N ended it."""
    return code if code >= 0 else 128 - code


def wait_for_all(children: Sequence[Child], seconds: float = math.inf) -> bool:
    """Wait until all have ended, for at most so many seconds; returns whether they have."""
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def wait_together(
    children: Sequence[Child], grace: Callable[[int], float], seconds: float = math.inf
) -> tuple[int, int] | None:
    """Wait until all have ended well, or one has failed and the others had their time to end too.

    Returns None, or the place and the code of the one that failed first; `grace(code)` is the others' time in seconds.
    Raises TimeoutError if none has failed, and one still runs, after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        codes = [child.poll() for child in children]
        # Of two that ended at once, the cause is the one that a signal ended (its code is negative).
        failed = min((code for code in codes if code), default=None)
        if failed is not None:
            wait_for_all(children, grace(failed))
            return codes.index(failed), failed
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            raise TimeoutError(f"it was still running after {seconds:g} s")
        time.sleep(POLL_SECONDS)


def end_all(children: Sequence[Child], seconds: float, asked: int = signal.SIGTERM) -> None:
    """End those that still run, and what they have started: by the signal `asked`, after `seconds` by force.

    What a child has started is reached where the child leads a process group, as one with a session of its own does.
    """
    for number, patience in ((asked, seconds), (signal.SIGKILL, FORCED_SECONDS)):
        for child in children:
            if child.poll() is None:
                try:
                    os.killpg(child.pid, number)
                except ProcessLookupError:  # it leads no group, or not yet
                    with contextlib.suppress(ProcessLookupError):
                        child.send_signal(number)
        if wait_for_all(children, patience):
            return
