"""The reader of a command's output may stop early (`| head`). Then the command ends too, silently."""

import functools
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

# What a shell reports for a program that the kernel ended because its reader had ended.
EXIT_CODE = 128 + getattr(signal, "SIGPIPE", 13)


def ends_with_its_reader(function: Callable[..., int]) -> Callable[..., int]:
    """Decorate a program's main function: it returns EXIT_CODE once nobody reads its output."""

    @functools.wraps(function)
    def ended(*arguments: Any, **options: Any) -> int:
        try:
            try:
                return function(*arguments, **options)
            finally:
                _flush()  # at the interpreter's end it would be too late: it could only complain
        except BrokenPipeError:
            unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
            if not unread:
                raise  # it was another pipe
            _let_go(unread)
            return EXIT_CODE

    return ended


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            raise
        except (AttributeError, ValueError, OSError):  # `streams` handles closed or full streams
            pass


def _is_unread(stream: Any) -> bool:
    """Whether the other end of a pipe is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except (AttributeError, ValueError, OSError):  # there is no such stream, or this system cannot tell
        return False


def _let_go(streams: list[Any]) -> None:
    """Redirect to nowhere what was not read, and what the interpreter flushes when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
