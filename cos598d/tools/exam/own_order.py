"""Hashes and orders of sets in a student's file, as in processes of their own, which have other hash seeds.

Ranks are forked from one process and share its seed. Between hosts a hash of a text differs from rank to rank, and with
it the order of a set. So each rank has hashes and orders of its own here, made from its number.
"""

import ast
import builtins
import random
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

NUMBERS = (int, float, complex, type(None))  # their hashes are the same in every process


def compiled_for(rank: int) -> Callable[[ModuleType, bytes, str], CodeType]:
    """What compiles a file for `rank`, and gives its module the `hash`, `set` and `frozenset` of that rank."""

    def compiled(module: ModuleType, source: bytes, path: str) -> CodeType:
        own = {"hash": _hash_of(rank), "set": _set_of(set, rank), "frozenset": _set_of(frozenset, rank)}
        vars(module)["__builtins__"] = vars(builtins) | own | {_Sets.NAME: own["set"]}
        tree = _Sets().visit(ast.parse(source, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    return compiled


class _Sets(ast.NodeTransformer):
    """Makes calls of {a, b} and {a for a in b}, which would be Python's own sets."""

    NAME = "set of this rank"  # which no file can use for a name

    def visit_Set(self, node: ast.Set) -> ast.AST:
        self.generic_visit(node)
        return self._call(node, ast.List(node.elts, ast.Load()))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return self._call(node, ast.GeneratorExp(node.elt, node.generators))

    def _call(self, node: ast.expr, argument: ast.expr) -> ast.AST:
        call = ast.Call(ast.Name(self.NAME, ast.Load()), [ast.copy_location(argument, node)], [])
        return ast.copy_location(call, node)


def _hash_of(rank: int) -> Callable[[Any], int]:
    return lambda value: hash(value) if isinstance(value, NUMBERS) else hash((rank, value))


def _set_of(kind: type, rank: int) -> type:
    """A set of that kind whose order is this rank's own, unless it has only numbers. It keeps its results' kind."""

    def order(self: Any) -> Iterator[Any]:
        elements = list(kind.__iter__(self))  # type: ignore[attr-defined]
        if not all(isinstance(each, NUMBERS) for each in elements):
            random.Random(rank * 1009 + len(elements)).shuffle(elements)
        return iter(elements)

    def pop(self: Any) -> Any:
        first = next(order(self))
        self.remove(first)
        return first

    members: dict[str, Any] = {"__iter__": order}
    if kind is set:
        members["pop"] = pop
    own = type(kind.__name__, (kind,), members)
    for name in ("copy", "difference", "intersection", "union", "__and__", "__or__", "__sub__", "__xor__"):
        setattr(own, name, lambda self, *others, name=name: own(getattr(kind, name)(self, *others)))
    return own
