"""Standard streams that are closed, full or of a limited encoding lead to a sentence, never to a traceback."""

import contextlib
import io
import os
import sys
from typing import Any

from cos598d.errors import UserError


class OutputLost(UserError):
    """Standard output cannot be written, for another reason than that its reader has ended."""


def prepare_streams() -> None:
    """Prepare this process's standard streams; a program calls it first.

    A character that their encoding lacks is written as an escape. A closed stream is opened to nowhere: otherwise a
    file opened later would get its number, and everything that is printed. Standard output that cannot be written
    raises OutputLost, once. What standard error cannot take is dropped.
    """
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest free number
    for name, number, is_error in (("stdout", 1, False), ("stderr", 2, True)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - the process's own
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, _Guarded(stream, is_error))


def unbuffer_streams() -> None:
    """In a fork, give this process unbuffered standard streams of its own, as `python -u` has."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - the process's own
        encoding = getattr(getattr(sys, name), "encoding", None) or "utf-8"
        setattr(sys, name, io.TextIOWrapper(raw, encoding, write_through=True))
    prepare_streams()


class _Guarded:
    """A text stream that raises its first error as a sentence, or drops it if it is standard error."""

    def __init__(self, stream: Any, is_error: bool):
        self._stream, self._is_error, self._is_lost = stream, is_error, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return len(text) if self._is_lost else self._try(self._stream.write, text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._is_lost:
            self._try(self._stream.flush)

    def _try(self, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except BrokenPipeError:  # its reader has ended, which is not an error: `commands.start` ends the program
            raise
        except OSError as error:
            self._is_lost = True
            # At its end the interpreter would try again to write what is left in the buffer, and complain.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if self._is_error:
                return len(arguments[0]) if arguments else None
            raise OutputLost(
                f"what is printed cannot be written ({error.strerror}). Make room there, or print elsewhere."
            ) from None
