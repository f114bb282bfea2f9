"""The script's own text: the line of each event, and the numbers by which a loss is multiplied or divided.

Half a squared error is divided by 2 on any number of ranks. `loss / world_size` on 2 ranks is the same arithmetic. The
text distinguishes them: only the first contains the number."""

import ast
import functools
import linecache
import os
import re
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_OURS = str(Path(__file__).resolve().parents[3])
_DEEPEST = 200
_MOST_FILES = 50
_RANKS = re.compile("world|rank|replica|proc|gpu|worker|device|node|shards", re.IGNORECASE)


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
        _known[file] = any(map(_is_installed, {file, os.path.realpath(file)}))
    return _known[file]


def _is_installed(file: str) -> bool:
    """Whether a file is in a place for packages, or listed in an installer's record."""
    if file.startswith(_LIBRARIES) or {"site-packages", "dist-packages"}.intersection(file.split(os.sep)):
        return True
    for folder in (each.rstrip(os.sep) + os.sep for each in sys.path if each):
        if file.startswith(folder) and file.removeprefix(folder).split(os.sep)[0] in _recorded(folder):
            return True
    return False


@functools.cache
def _recorded(folder: str) -> frozenset[str]:
    """The first parts of the paths in a folder's installation records, as `pip install --target` writes them."""
    lines = [line for record in Path(folder).glob("*.dist-info/RECORD") for line in record.read_text().splitlines()]
    return frozenset(line.split("/")[0].split(",")[0] for line in lines)


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


@functools.cache
def literals(file: str) -> tuple[float, ...] | None:
    """The numbers in a loss's text: in the argument of `backward`, and in everything from which it is computed.

    That is in `file`, and in the script's own files that it imports. None without text, or without such a call.
    """
    made, losses = _made(file)
    if not losses:
        return None
    return tuple(sorted({number for node in _reached(made, losses) for number in _factors(node)}))


@functools.cache
def divides_by_ranks(file: str) -> bool:
    """Whether the text of a loss, as `literals` reads it, divides by something computed from the number of ranks.

    Only a name distinguishes it from another equal number, such as a temperature of 2 on two ranks.
    """
    made, losses = _made(file)
    divisors = [each for node in _reached(made, losses) for each in _divisors(node)]
    return any(_RANKS.search(word) for node in _reached(made, divisors) for word in _words(node))


def _made(file: str) -> tuple[dict[str, list[ast.AST]], list[ast.AST]]:
    """By name, what it is assigned, what the function of that name does, or what is passed for it; and all losses."""
    made: dict[str, list[ast.AST]] = {}
    losses: list[ast.AST] = []
    for tree in _trees(file):
        parameters = {node.name: node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            for name, value in (*_assigned(node), *_passed(node, parameters)):
                made.setdefault(name, []).append(value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                losses += [node.func.value, *node.args, *(each.value for each in node.keywords)]
    return made, losses


def _reached(made: Mapping[str, Sequence[ast.AST]], begin: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of these expressions, and of everything from which their names are made."""
    waiting = [*begin]
    seen: set[tuple[str, bool]] = set()
    while waiting:
        whole = waiting.pop()
        called = {id(node.func) for node in ast.walk(whole) if isinstance(node, ast.Call)}
        places = {
            id(part) for node in ast.walk(whole) if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)
        }
        for node in ast.walk(whole):
            yield node
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            key = name, id(node) in called
            if name and key not in seen and id(node) not in places:
                seen.add(key)
                # Of what is called, only what it does is of the loss: a model's sizes are not.
                waiting += [each for each in made.get(name, []) if isinstance(each, ast.FunctionDef) or not key[1]]


def _trees(file: str) -> list[ast.Module]:
    """The parsed text of a file, and of the files of the script's own that it imports."""
    files = [file]
    trees: list[ast.Module] = []
    for each in files:
        try:
            trees.append(ast.parse("".join(linecache.getlines(each))))
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(trees[-1]):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                path = getattr(sys.modules.get(name or ""), "__file__", None)
                if path and path not in files and len(files) < _MOST_FILES and not is_library(path):
                    files.append(path)
    return trees


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that a statement makes, and from what. A function's is its body; __init__ computes no loss."""
    if isinstance(node, ast.FunctionDef) and node.name != "__init__":
        yield node.name, node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ((each.id, node.value) for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node


def _passed(node: ast.AST, parameters: Mapping[str, ast.arguments]) -> Iterator[tuple[str, ast.AST]]:
    """The parameters of one of the file's functions, and what a call passes for them."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in parameters:
        yield from zip([each.arg for each in parameters[node.func.id].args], node.args, strict=False)
        yield from ((each.arg, each.value) for each in node.keywords if each.arg)


def _divisors(node: ast.AST) -> Iterator[ast.AST]:
    """What an expression, `/=` or a function divides by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield node.right
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        yield node.value
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith(("div", "true_divide")):
        yield from node.args


def _words(node: ast.AST) -> Iterator[str]:
    """The name in a node, or its text, such as a variable of the environment."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _factors(node: ast.AST) -> Iterator[float]:
    """The numbers by which an expression, or `/=`, multiplies or divides something that is not a number."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        values = [_number(each) for each in (node.left, node.right)]
        if None in values:
            yield from (each for each in values if each is not None)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div):
        yield from (each for each in [_number(node.value)] if each is not None)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith(("mul", "div")):
        yield from (each for each in map(_number, node.args) if each is not None)


def _number(node: ast.AST) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return None
