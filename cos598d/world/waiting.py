"""Waiting for something that another rank does."""

import sys
import time
from collections.abc import Callable

SHORTEST_POLL, LONGEST_POLL = 2e-4, 0.05  # seconds between two looks
TELL_SECONDS = 2.0


def wait(is_so: Callable[[], bool], seconds: float, whom: Callable[[], str] | None = None) -> bool:
    """Wait until `is_so`, at most `seconds`; return whether it is. With `whom`, say once for whom it waits."""
    began, told, pause = time.monotonic(), whom is None, SHORTEST_POLL
    while not is_so():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        if whom and not told and waited > TELL_SECONDS:
            print(f"waiting for {whom()} ...", file=sys.stderr, flush=True)
            told = True
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL)
    return True
