"""Whoever reads what a command prints may leave before its end (`| head`): then it ends too, and says nothing."""

import functools
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

# What a shell reports of a program that the kernel has ended for it.
EXIT_CODE = 128 + getattr(signal, "SIGPIPE", 13)


def ends_with_its_reader(function: Callable[..., int]) -> Callable[..., int]:
    """`function`, a program's main one, that returns EXIT_CODE where nobody reads any more what it prints."""

    @functools.wraps(function)
    def ended(*arguments: Any, **options: Any) -> int:
        try:
            try:
                return function(*arguments, **options)
            finally:
                _flush()  # at the interpreter's end it would be too late for anything but a complaint
        except BrokenPipeError:
            unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
            if not unread:
                raise  # another pipe's
            _let_go(unread)
            return EXIT_CODE

    return ended


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            raise
        except (AttributeError, ValueError, OSError):  # there is none, or it is closed or full: not this file's matter
            pass


def _is_unread(stream: Any) -> bool:
    """Whether the other end of a pipe is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except (AttributeError, ValueError, OSError):  # there is no such stream, or on this system no way to ask
        return False


def _let_go(streams: list[Any]) -> None:
    """Let what was not read, and what is flushed when the interpreter ends, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
