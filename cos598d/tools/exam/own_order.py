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
    """What compiles a file for `rank`, and gives its module the `hash` and the `set` of that rank."""

    def order(self: Any) -> Iterator[Any]:
        elements = list(set.__iter__(self))
        if not all(isinstance(each, NUMBERS) for each in elements):
            random.Random(rank * 1009 + len(elements)).shuffle(elements)
        return iter(elements)

    own = {
        "hash": lambda value: hash(value) if isinstance(value, NUMBERS) else hash((rank, value)),
        "set": type("set", (set,), {"__iter__": order}),
    }

    def compiled(module: ModuleType, source: bytes, path: str) -> CodeType:
        vars(module)["__builtins__"] = vars(builtins) | own
        tree = _Sets().visit(ast.parse(source, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    return compiled


class _Sets(ast.NodeTransformer):
    """Makes a call of `set` of {a for a in b}, which would be Python's own."""

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        elements = ast.copy_location(ast.GeneratorExp(node.elt, node.generators), node)
        return ast.copy_location(ast.Call(ast.Name("set", ast.Load()), [elements], []), node)
