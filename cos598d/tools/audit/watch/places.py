"""Where in the script something happens: the file and the line of the innermost frame that is no library's."""

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_OURS = str(Path(__file__).resolve().parents[3])
_DEEPEST = 200


class ScriptLine(NamedTuple):
    """A line of the script; `file` is "" where none of its frames is on the stack."""

    file: str
    line: int
    function: str


NOWHERE = ScriptLine("", 0, "")


def _libraries() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), _OURS, "<"]
    return tuple(path if path == "<" else path.rstrip(os.sep) + os.sep for path in paths if path)


_LIBRARIES = _libraries()
_known: dict[str, bool] = {}


def is_library(file: str) -> bool:
    """Whether a file is part of Python, of an installed package, or of this one."""
    if file not in _known:
        _known[file] = file.startswith(_LIBRARIES) or os.path.realpath(file).startswith(_LIBRARIES)
    return _known[file]


def frames() -> Iterator[FrameType]:
    """The frames of who has called the caller's caller, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def here(otherwise: ScriptLine = NOWHERE) -> ScriptLine:
    """The script's innermost frame; `otherwise` where there is none, as on autograd's own threads."""
    for frame in frames():
        if not is_library(frame.f_code.co_filename):
            return ScriptLine(os.path.abspath(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)
    return otherwise


def called_from(functions: frozenset[str]) -> str:
    """The innermost function on the stack that has one of these names; "" where none has."""
    for frame in frames():
        if frame.f_code.co_name in functions:
            return frame.f_code.co_name
    return ""
