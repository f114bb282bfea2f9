"""How a rank ends: one sentence on standard error."""

import contextlib
import os
import sys
import threading
import time

from cos598d.errors import ERROR

NEWS_SECONDS = 0.2  # rank 0 serves the store, whose end would hide the news from the others

_ending = threading.Lock()  # held by the one thread that says why this process ends


def lost(who: str) -> str:
    """The sentence for ranks whose connection has ended."""
    return (
        f"lost connection to {who}: it was killed, or its host is down. Look there, then repeat the command, with "
        "--resume auto if the run has saved a checkpoint."
    )


def exit_now(rank: int, sentence: str, exit_code: int) -> None:
    """End this process at once, with one sentence on standard error."""
    _ending.acquire()  # another thread that comes here waits for the end
    try:
        print_last_words(rank, sentence)
        if rank == 0:
            time.sleep(NEWS_SECONDS)
    finally:
        os._exit(exit_code)


def print_last_words(rank: int | None, sentence: str) -> None:
    """Print on standard error why this process ends, with its rank if there are several."""
    with contextlib.suppress(OSError, ValueError):  # either stream may be closed or unread by now
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        start = "\r\033[K" if sys.stderr.isatty() else ""  # the line may hold a progress bar
        who = "" if rank is None else f"rank {rank}: "
        sys.stderr.write(f"{start}{ERROR}{who}{sentence}\n")  # one write, so that ranks' lines do not mix
        sys.stderr.flush()
