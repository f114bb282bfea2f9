"""What the text of a student's file shows: its lines, its blanks, and calls past the communicator."""

import ast
import re
from pathlib import Path

BLANK = re.compile(r"\.\.\.\s*#\s*your turn")
Definition = ast.FunctionDef | ast.ClassDef


def line_of(file: Path, name: str = "") -> int:
    """The line in which the file defines `name`, such as "LossScaler" or "LossScaler.step". 0 without definitions.

    By default it is that of the file's last function or class; of a method that is missing, that of its class.
    """
    found = _definitions(ast.parse(file.read_bytes()))
    line = found[-1].lineno if found else 0
    for part in name.split("."):
        node = next((each for each in found if each.name == part), None)
        if node is None:
            break
        line, found = node.lineno, _definitions(node)
    return line


def _definitions(node: ast.Module | Definition) -> list[Definition]:
    return [each for each in node.body if isinstance(each, Definition)]


def rebound(file: Path) -> tuple[int, str] | None:
    """The first line in which a function gives the name of its parameter to a computed value, and the name."""
    for function in (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.FunctionDef)):
        parameters = {each.arg for each in function.args.args}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                target = node.targets[0]
                if isinstance(target, ast.Name) and target.id in parameters:
                    return node.lineno, target.id
    return None


def first_blank(source: str) -> int:
    """The line of the first blank that is still to be filled in; 0 if there is none."""
    return next((number for number, text in enumerate(source.splitlines(), 1) if BLANK.search(text)), 0)


def torch_calls(source: str) -> tuple[int, str] | None:
    """The first call in the text of a function of torch.distributed: its line and its name; None without one."""
    tree = ast.parse(source)
    names = {"torch.distributed"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            whole = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if whole.startswith("torch.distributed"):
                names.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in names or called.rpartition(".")[0] in names:
                return node.lineno, called.rpartition(".")[2]
    return None
