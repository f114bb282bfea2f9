"""The errors a user can cause: what is wrong, with the value, then a sentence with the fix."""

import contextlib
import re
from collections.abc import Iterator

# What every error and every warning begins with on standard error, before the rank where there are several.
ERROR = "error: "
WARNING = "warning: "


class UserError(Exception):
    """Something that the user gave cannot work.

    The message is what was wrong (with the value) and what was expected, then a sentence with the fix.
    Every entry point prints it after ERROR, without a traceback, and exits with `exit_code`.
    """

    exit_code = 1


class UsageError(UserError):
    """An argument on the command line that cannot work, noticed before anything started."""

    exit_code = 2


class HubUnreachable(UserError):
    """The model hub gave no answer, or may not be asked, and its cache lacks a needed file."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says, short enough for a part of a sentence; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:")[:200] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """What an error says, in a line; of a backend's, neither the place in its source nor its guesses at the cause."""
    text = re.sub(r"\[[^][\s]+\.(cc|cpp|h):\d+\]\s*", "", " ".join(str(error).split()))
    return text.partition(" This is typically caused by")[0].rstrip(".") or type(error).__name__


@contextlib.contextmanager
def flag_called(here: str, there: str) -> Iterator[None]:
    """Let an error in the block name the flag `there` as `here`, which is what the user has typed."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).replace(there, here),)
        raise
