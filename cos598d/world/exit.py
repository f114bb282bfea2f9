"""How a rank ends: one sentence on standard error, once per shared terminal, and no half-written files."""

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

from cos598d.errors import ERROR
from cos598d.terminal.files import remove_unfinished

_resume_flags: list[str] = []  # at most one
# how long the first process keeps a sentence, so that processes failing a little later do not repeat it
STAY_SECONDS = 2.0
NEWS_SECONDS = 0.2


_listeners: list[Callable[[str], None]] = []


def resumes_by(flag: str) -> None:
    """From now on, advice to repeat the command has this flag, which resumes the run; "" for none."""
    _resume_flags[:] = [flag] if flag else []


def lost_rank(rank: int | str) -> str:
    """The sentence for a rank, or several, whose connection has ended."""
    flag = f", with {_resume_flags[0]} if the run has saved a checkpoint" if _resume_flags else ""
    return (
        f"lost connection to rank {rank}: it was killed, or its host is down. Look at that rank's host, then repeat "
        f"the command on every rank{flag}."
    )


def tell_of_the_end(listener: Callable[[str], None]) -> None:
    """From now on, call `listener` with the error sentence if this process ends early."""
    _listeners.append(listener)


def tell_no_more(listener: Callable[[str], None]) -> None:
    """Do not call `listener` for an early end any more."""
    _listeners.remove(listener)


def exit_now(rank: int, sentence: str, exit_code: int) -> None:
    """End this process at once, with one sentence on standard error and no half-written files."""
    try:
        remove_unfinished()
        print_last_words(rank, sentence)
        for listener in _listeners:
            with contextlib.suppress(Exception):  # whatever a half-ended process cannot do any more
                listener(sentence)
        if rank == 0:
            time.sleep(NEWS_SECONDS)  # rank 0 serves the store: the others must read their news before it vanishes
    finally:
        os._exit(exit_code)


def print_last_words(rank: int | None, sentence: str) -> None:
    """Print on standard error why this process ends, with its rank if there are several."""
    with contextlib.suppress(OSError, ValueError):  # either stream may be closed or unread by now
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        # The terminal's line may hold a progress bar: return to its start.
        start = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{start}{ERROR}{'' if rank is None else f'rank {rank}: '}{sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def first_to_say(sentence: str) -> Iterator[bool]:
    """Yield whether this process is the first of its parent's children with this sentence, and then stay a moment.

    On Linux the kernel decides: an abstract socket's name belongs to one process at a time, until that process ends. On
    other systems every process counts as the first.
    """
    if sys.platform != "linux":
        yield True
        return
    words = f"{os.getuid()} {os.getppid()} {sentence}"
    name = f"\0cos598d {hashlib.sha256(words.encode(errors='replace')).hexdigest()}"  # the NUL makes it abstract
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(name)
        except OSError as error:
            yield error.errno != errno.EADDRINUSE
            return
        yield True
        time.sleep(STAY_SECONDS)
