"""The line of the script in which each event happens: the innermost frame that is no library's."""

import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_OURS = str(Path(__file__).resolve().parents[3])
_DEEPEST = 200


class ScriptLine(NamedTuple):
    """A line of the script; `file` is "" if none of its frames is on the stack."""

    file: str
    line: int
    function: str


NOWHERE = ScriptLine("", 0, "")


def _libraries() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(torch.__file__), _OURS, "<"]
    return tuple(path if path == "<" else path.rstrip(os.sep) + os.sep for path in paths if path)


_LIBRARIES = _libraries()
_known: dict[str, bool] = {}


def is_library(file: str) -> bool:
    """Whether a file is part of Python, of an installed package, or of this one."""
    if file not in _known:
        _known[file] = any(
            each.startswith(_LIBRARIES) or {"site-packages", "dist-packages"}.intersection(each.split(os.sep))
            for each in {file, os.path.realpath(file)}
        )
    return _known[file]


def frames() -> Iterator[FrameType]:
    """The frames of the caller's callers, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def here(otherwise: ScriptLine = NOWHERE) -> ScriptLine:
    """The script's innermost frame; `otherwise` if there is none, as on autograd's own threads."""
    for frame in frames():
        if not is_library(frame.f_code.co_filename):
            return ScriptLine(os.path.abspath(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)
    return otherwise


def main_line() -> ScriptLine:
    """Where the main thread is in the script, seen from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return NOWHERE
    return ScriptLine(os.path.abspath(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)


def is_in_torch() -> bool:
    """Whether the main thread is in a call of torch that may wait for other ranks, seen from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    code = frame.f_code
    is_of_ranks = os.path.join("torch", "distributed") in code.co_filename
    # _wait is the audit's own, around wait. Threads and programs are waited for by functions of these names, too.
    is_ours = code.co_filename.startswith((os.path.dirname(torch.__file__) + os.sep, _OURS))
    return is_of_ranks or (is_ours and code.co_name in ("wait", "_wait", "_engine_run_backward"))


def called_from(functions: frozenset[str]) -> str:
    """The innermost function on the stack with one of these names; "" if there is none."""
    for frame in frames():
        if frame.f_code.co_name in functions:
            return frame.f_code.co_name
    return ""
