"""Processes that this one has started: it waits for them together, and ends them with their own children.

It is for processes of which none is of use without the others: the ranks of a run, the programs of emulated hosts. One
that fails ends the rest, after some seconds in which they may report what they noticed.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

POLL_SECONDS = 0.05
FORCED_SECONDS = 5.0  # how long a killed process may take to end


class Child(Protocol):
    """A started process, such as a Popen.

    `poll` gives its exit code, -N if signal N ended it, and None while it runs.
    """

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...


def exit_code_of(code: int) -> int:
    """The exit code of an ended process, as a shell reports it: 128 + N if signal N ended it."""
    return code if code >= 0 else 128 - code


def wait_for_all(children: Sequence[Child], seconds: float = math.inf) -> bool:
    """Wait at most `seconds` until all have ended. Return whether they have."""
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def wait_together(
    children: Sequence[Child], grace: Callable[[int], float], seconds: float = math.inf
) -> tuple[int, int] | None:
    """Wait until all have ended well, or until one has failed and the others had their time to end too.

    Return None, or the index and exit code of the first that failed. `grace(code)` is the others' time in seconds.
    Raises TimeoutError if none has failed but one still runs after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        codes = [child.poll() for child in children]
        # If two ended at once, the one that a signal ended (its code is negative) is the cause.
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
    """End those that still run, and their own children: by the signal `asked`, and after `seconds` by force.

    A child's own children are reached if the child leads a process group, as one with a session of its own does.
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
