"""Numbers in the script's text by which a loss is multiplied or divided: they are part of what the loss is meant to be.

Half a squared error is divided by 2 on any number of ranks; `loss / world_size` on 2 ranks is the same arithmetic. The
text tells them apart: the first has the number in it.
"""

import ast
import functools
import linecache
import sys
from collections.abc import Iterator

from cos598d.tools.audit.watch.places import is_library

_MOST_FILES = 50


@functools.cache
def literals(file: str) -> tuple[float, ...] | None:
    """The numbers in what `backward` is called on in a file, and in what that is computed from, there and in the files
    of the script's own that it imports; None where there is no text, or no such call."""
    made: dict[str, list[ast.AST]] = {}  # by name: what it is assigned, or what a function of that name does
    waiting: list[ast.AST] = []
    for tree in _trees(file):
        for node in ast.walk(tree):
            for name, value in _assigned(node):
                made.setdefault(name, []).append(value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                waiting += [node.func.value, *node.args]
    if not waiting:
        return None
    found: set[float] = set()
    seen: set[tuple[str, bool]] = set()
    while waiting:
        whole = waiting.pop()
        called = {id(node.func) for node in ast.walk(whole) if isinstance(node, ast.Call)}
        places = {
            id(part) for node in ast.walk(whole) if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)
        }
        for node in ast.walk(whole):
            found.update(_factors(node))
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            key = name, id(node) in called
            if name and key not in seen and id(node) not in places:
                seen.add(key)
                # Of what is called, only what it does is of the loss: a model's sizes are not.
                waiting += [each for each in made.get(name, []) if isinstance(each, ast.FunctionDef) or not key[1]]
    return tuple(sorted(found))


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
    """The names that a statement makes, and from what; of functions, their bodies. A module's own pass is no loss."""
    if isinstance(node, ast.FunctionDef) and node.name != "__init__":
        yield node.name, node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ((each.id, node.value) for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node


def _factors(node: ast.AST) -> Iterator[float]:
    """The numbers by which an expression, or `/=`, multiplies or divides something that is not a number itself."""
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
