"""Hashes and sets of a student's file as in processes of their own, which have other hash seeds.

Ranks are forked from one process and share its seed. Between hosts a hash of a text differs from rank to rank, and with
it the order of a set. So each rank has hashes and orders of its own here, made from its number.
"""

import ast
import builtins
import numbers
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

SALT = 0x5851F42D4C957F2D
COPIES = (
    "copy",
    "difference",
    "intersection",
    "symmetric_difference",
    "union",
    "__and__",
    "__or__",
    "__sub__",
    "__xor__",
)


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


def _is_stable(value: Any) -> bool:
    """Whether its hash is the same in every process."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_stable, value))
    return value is None or isinstance(value, numbers.Number)


def _hash_of(rank: int) -> Callable[[Any], int]:
    def hash_of_rank(value: Any) -> int:
        found = hash(value)
        return found if _is_stable(value) else hash(found ^ (rank * SALT))

    return hash_of_rank


class _AnySet(type):
    """Of a rank's sets: Python's own count as theirs."""

    kind: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind) if "kind" in vars(cls) else super().__instancecheck__(value)


def _set_of(kind: Any, rank: int) -> type:
    """A rank's `set` or `frozenset`: iterates in an order of its own where another process would."""

    def in_order(self: Any) -> list[Any]:
        found = list(kind.__iter__(self))  # type: ignore[attr-defined]
        if all(map(_is_stable, found)):
            return found
        place = (rank // 2) % max(len(found), 1)
        found = found[place:] + found[:place]
        return found[::-1] if rank % 2 else found

    def iterate(self: Any) -> Iterator[Any]:
        return iter(in_order(self))

    def pop(self: Any) -> Any:
        """Remove one of the elements, and return it. Raises KeyError if there is none."""
        for first in in_order(self):
            self.remove(first)
            return first
        raise KeyError("pop from an empty set")

    def again(name: str) -> Callable[..., Any]:
        def call(self: Any, *others: Any) -> Any:
            found = getattr(kind, name)(self, *others)
            return found if found is NotImplemented else own(found)

        return call

    more = {"__iter__": iterate, "kind": kind, **{name: again(name) for name in COPIES}}
    own = _AnySet(kind.__name__, (kind,), more | ({"pop": pop} if kind is set else {}))
    return own
