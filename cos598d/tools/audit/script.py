"""Somebody's script, run in this process as `python script.py` would run it."""

import contextlib
import importlib.util
import linecache
import os
import runpy
import sys
import traceback
from collections.abc import Sequence

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable

MODULE = "-m "  # begins a script that is a module


def module_of(words: Sequence[str]) -> str:
    """The script that `python -m` runs with these words. Raises UsageError without any."""
    if not words:
        raise UsageError("-m needs a module. Give its name, as in `audit -- -m package.train`.")
    return f"{MODULE}{words[0]}"


def words_of(path: str) -> list[str]:
    """The words that name the script on a command line."""
    return ["-m", path.removeprefix(MODULE)] if path.startswith(MODULE) else [path]


def check(path: str) -> None:
    """Raise UsageError if there is no such script, or module."""
    if path.startswith(MODULE):
        sys.path.insert(0, os.getcwd())
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(path.removeprefix(MODULE)):
                return
        fix = "Start the audit in the folder where python -m finds it."
        raise UsageError(f"{printable(path)} is not a module here. {fix}")
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist. Give the script to audit, or the folder of an audit.")
    if not os.path.isfile(path):
        raise UsageError(f"{path} is not a file. Give the script to audit.")


def run(path: str, words: Sequence[str]) -> tuple[int, str]:
    """Run a script as the main program; return its exit code, and the error that ended it ("": none).

    A traceback is printed as Python would print it, without the frames that led to the script.
    """
    is_module = path.startswith(MODULE)
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(path))
    sys.argv = [path, *words]
    linecache.checkcache()
    # The script gets plain streams, without the guards of the program's own.
    sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    try:
        if is_module:
            runpy.run_module(path.removeprefix(MODULE), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    except SystemExit as asked:
        return exit_code(asked.code), ""
    except KeyboardInterrupt:
        traceback.print_exc(limit=-3)
        return 130, "interrupted (Ctrl-C)"
    except BaseException as error:
        from cos598d.tools.audit.watch.places import is_library  # which loads torch

        frames = error.__traceback__
        while frames is not None and is_library(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        sys.excepthook(type(error), error, frames)
        return 1, told(error)
    return 0, ""


def told(error: BaseException) -> str:
    """An error in a line, with the place in the script where it was raised."""
    from cos598d.tools.audit.watch.places import is_library  # which loads torch

    frames = [each for each in traceback.extract_tb(error.__traceback__) if not is_library(each.filename)]
    at = f", raised at {os.path.basename(frames[-1].filename)} line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def exit_code(code: object) -> int:
    """The exit code of a process that raises SystemExit with this code; a text is printed, as Python does."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
