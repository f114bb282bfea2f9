"""What a gradient sync is expected to cost: the formulas of the docstrings, in numbers that a ledger can be held to.

Each sync's classmethod `expected(tensors, ranks, rank, options)` gives one step's cost on one rank; `tensors` are
(elements, bytes per element) of the trainable parameters of one dtype, in the model's order, all of them used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cos598d.comm.gloo import all_reduce_bytes

Sizes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Cost:
    """Calls and bytes of one rank in one step; `calls` is None where a library chooses how many."""

    calls: int | None
    bytes_sent: int
    bytes_received: int


NOTHING = Cost(0, 0, 0)


def payloads(tensors: Sizes) -> list[int]:
    """The bytes of each tensor."""
    return [elements * element_bytes for elements, element_bytes in tensors]


def all_reduces(sizes: Iterable[int], ranks: int) -> Cost:
    """The cost of one ring all-reduce for each payload of `sizes` bytes: 2(n-1)/n of each, both ways."""
    if ranks == 1:
        return NOTHING
    moved = [all_reduce_bytes(payload, ranks) for payload in sizes]
    return Cost(len(moved), sum(moved), sum(moved))
