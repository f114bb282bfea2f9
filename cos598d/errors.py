"""The errors a user can cause: what is wrong, with the value, then a sentence with the fix."""

import contextlib
import re
from collections.abc import Iterator

# The prefix of every error and warning on standard error. With several ranks, the rank follows it.
ERROR = "error: "
WARNING = "warning: "


class UserError(Exception):
    """The user gave something that cannot work.

    The message names what was wrong, the value, and what was expected. A sentence with the fix follows. Every entry
    point prints it after ERROR, without a traceback, and exits with `exit_code`.
    """

    exit_code = 1


class UsageError(UserError):
    """A command-line argument cannot work. Raised before anything has started."""

    exit_code = 2


class HubUnreachable(UserError):
    """The model hub did not answer, or may not be asked, and its cache lacks a file that is needed."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened for use in a sentence; the error's type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:")[:200] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """An error's message on one line. Errors of a backend lose their source location and their guesses at a cause."""
    text = re.sub(r"\[[^][\s]+\.(cc|cpp|h):\d+\]\s*", "", " ".join(str(error).split()))
    return text.partition(" This is typically caused by")[0].rstrip(".") or type(error).__name__


@contextlib.contextmanager
def flag_called(here: str, there: str) -> Iterator[None]:
    """In errors raised in the block, replace the flag `there` by `here`, the one that the user typed."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).replace(there, here),)
        raise
