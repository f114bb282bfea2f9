"""A student's file of tests as it can be known without running it: its test functions, and what each asks for."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain

GIVEN = ("sync", "rank", "world_size")
PREFIX = "test_"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class StudentTest:
    """A function of the file. `arguments` are those of GIVEN that it asks for."""

    name: str
    arguments: tuple[str, ...]
    line: int


def read_tests(path: Path) -> list[StudentTest]:
    """The file's tests, in order. Raises UsageError, with the line, for what cannot be run as tests."""
    try:
        source = read_plain(path)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read ({error.strerror}).") from None
    if len(source) > MOST_BYTES:
        raise UsageError(f"{path.name} has {len(source)} bytes. Keep a file of tests below {MOST_BYTES}.")
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise UsageError(f"{path.name} is not valid Python ({error.msg}, line {error.lineno}).") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{path.name} is not valid Python ({error or 'nested too deeply'}).") from None
    found: dict[str, StudentTest] = {}
    for node in body:
        _check_runs(node, path.name)
        if isinstance(node, ast.FunctionDef) and node.name.startswith(PREFIX):
            test = StudentTest(node.name, _arguments(node, path.name), node.lineno)
            if test.name in found:
                before = found[test.name].line
                raise UsageError(
                    f"{path.name} line {test.line}: the test {printable(test.name, 60)} of line {before} would never "
                    "run, because this one has its name. Give each test a name of its own."
                )
            found[test.name] = test
    if not found:
        raise UsageError(
            f"{path.name} has no test. Write functions whose names begin with {PREFIX}, outside of any class."
        )
    return list(found.values())


def _check_runs(node: ast.stmt, file: str) -> None:
    """Raise UsageError for what looks like a test but would not run, or not as its decorators ask."""
    if isinstance(node, ast.ClassDef):
        inner = next((each for each in node.body if _is_test(each)), None)
        if inner is not None:
            raise UsageError(f"{_place(inner, file)} would never run in a class. Write it outside of any.")
    elif _is_test(node):
        marks = [ast.unparse(each) for each in node.decorator_list]
        marked = next((mark for mark in marks if mark.startswith(("pytest.", "mark.", "unittest."))), None)
        if marked is not None:
            raise UsageError(
                f"{_place(node, file)} is marked {printable(marked, 60)}, which the grader does not support. Write a "
                "loop for several values, and raise unittest.SkipTest to skip."
            )
        if isinstance(node, ast.AsyncFunctionDef) or any(map(_yields, node.body)):
            raise UsageError(f"{_place(node, file)} would never run. Write it without async and yield.")


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(PREFIX)


def _yields(node: ast.AST) -> bool:
    """Whether it has a yield, except inside functions and classes that it defines."""
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    is_inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
    return not is_inner and any(map(_yields, ast.iter_child_nodes(node)))


def _place(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> str:
    return f"{file} line {node.lineno}: {printable(node.name, 60)}"


def _arguments(node: ast.FunctionDef, file: str) -> tuple[str, ...]:
    """The function's arguments. Raises UsageError for one that the grader does not give to tests."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    needed = [*positional[: len(positional) - len(given.defaults)]]
    needed += [each for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    unknown = next((each.arg for each in needed if each.arg not in GIVEN), None)
    if unknown is not None or given.posonlyargs:
        what = printable(unknown or "what is before /", 60)
        raise UsageError(
            f"{file} line {node.lineno}: {printable(node.name, 60)} asks for {what}. A test can ask for "
            f"{', '.join(GIVEN[:-1])} and {GIVEN[-1]}, by these names."
        )
    return tuple(each.arg for each in (*positional, *given.kwonlyargs) if each.arg in GIVEN)
