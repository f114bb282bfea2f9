"""Somebody's script, run in this process as `python script.py` would run it."""

import importlib.util
import linecache
import os
import sys
import traceback
import types
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
MODULE = "-m "  # begins a script that is a module


def module_of(words: Sequence[str]) -> str:
    """The script that `python -m` runs with these words. Raises UsageError without any."""
    if not words:
        raise UsageError("-m needs a module. Give its name, as in `audit -- -m package.train`.")
    return f"{MODULE}{words[0]}"


def words_of(path: str) -> list[str]:
    """The words that name the script on a command line."""
    return ["-m", path.removeprefix(MODULE)] if path.startswith(MODULE) else [path]


def _spec_of(name: str) -> ModuleSpec:
    """The place of a module's code, or of a package's `__main__`. Raises UsageError if there is none."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or not spec.origin or not isinstance(spec.loader, InspectLoader):
        raise UsageError(
            f"-m {printable(name)} is not a module here. Start the audit in the folder where python -m finds it."
        )
    return spec


def load(path: str) -> CodeType:
    """The code of a script, or of a module. Raises UsageError if there is none, or if it is not Python."""
    if path.startswith(MODULE):
        sys.path.insert(0, os.getcwd())
        path = _spec_of(path.removeprefix(MODULE)).origin or ""
        del sys.path[0]
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist. Give the script to audit, or the folder of an audit.")
    if not os.path.isfile(path):
        raise UsageError(f"{path} is not a file. Give the script to audit.")
    try:
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}). Give the script to audit.") from None
    except (SyntaxError, ValueError) as error:
        line = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{path} is not Python ({printable(said, 100)}{line}). Give a script in Python.") from None


def run(code: CodeType, path: str, words: Sequence[str]) -> tuple[int, str]:
    """Run a script's code as the main program; return its exit code, and the error that ended it ("": none).

    A traceback is printed as Python would print it, without the frames that led to the script.
    """
    main = types.ModuleType("__main__")
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    if path.startswith(MODULE):
        sys.path[0] = os.getcwd()
        spec = _spec_of(path.removeprefix(MODULE))
        main.__dict__.update(__spec__=spec, __package__=spec.parent)
        path = spec.origin or ""
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", path))
    sys.modules["__main__"] = main
    sys.argv = [path, *words]
    linecache.checkcache()
    # The script gets plain streams, without the guards of the program's own.
    sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    try:
        exec(code, main.__dict__)
    except SystemExit as asked:
        return exit_code(asked.code), ""
    except KeyboardInterrupt:
        traceback.print_exc(limit=-3)
        return 130, "interrupted (Ctrl-C)"
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
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
