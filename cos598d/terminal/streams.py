"""What a program prints, where its streams are closed, full or of few letters: never a traceback, and nothing worse."""

import contextlib
import os
import sys
from typing import Any

from cos598d.errors import UserError


class OutputLost(UserError):
    """What is printed cannot be written, for a reason other than that its reader has left."""


def prepare_streams() -> None:
    """Make this process's standard streams fit for anything, first of all that a program does.

    A letter that their encoding has not is written as an escape. A stream that is closed goes nowhere, lest a file that
    is opened later takes its number and everything printed goes there. What cannot be printed raises OutputLost, once;
    what cannot be complained of is not.
    """
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name, number, is_complaint in (("stdout", 1, False), ("stderr", 2, True)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - the process's own
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, _Guarded(stream, is_complaint))


class _Guarded:
    """A text stream whose errors are told once, in a sentence, or not at all."""

    def __init__(self, stream: Any, is_complaint: bool):
        self._stream, self._is_complaint, self._is_lost = stream, is_complaint, False

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
        except BrokenPipeError:  # its reader has left, which is no error: `reader.py` ends the program
            raise
        except OSError as error:
            self._is_lost = True
            # What is left in its buffer would be tried again, and complained of, at the interpreter's end.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if self._is_complaint:
                return len(arguments[0]) if arguments else None
            raise OutputLost(
                f"what is printed cannot be written ({error.strerror}): make room there, or print elsewhere."
            ) from None
