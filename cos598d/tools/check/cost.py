"""A sync's calls and bytes in one step, held against the formulas of the registered syncs."""

import math
from collections.abc import Sequence
from typing import Any

from cos598d.sync import SYNCS, get_sync
from cos598d.sync.cost import Cost
from cos598d.tools.check.toy import plain_model


def compare(name: str, made: Sequence[dict[str, int]]) -> dict[str, Any]:
    """The measured cost of every rank, and the cost by formula of the nearest registered sync.

    Nearest is the one whose calls and bytes differ least, as ratios, over all ranks; of equals the sync itself, then
    the first in the registry.
    """
    sizes = [(p.numel(), p.element_size()) for p in plain_model().parameters()]
    found = [Cost(each["calls"], each["bytes_sent"], each["bytes_received"]) for each in made]
    candidates: dict[str, list[Cost]] = {}
    for other in sorted(SYNCS, key=lambda each: each != name):
        costs = [get_sync(other).expected(sizes, len(made), rank) for rank in range(len(made))]
        stated = [cost for cost in costs if cost and cost.calls is not None]
        if stated == costs:
            candidates[other] = stated
    nearest = min(candidates, key=lambda each: _distance(found, candidates[each]))
    return {
        "world_size": len(made),
        "gradient_bytes": sum(elements * size for elements, size in sizes),
        "tensors": len(sizes),
        "nearest": nearest,
        "is_equal": found == candidates[nearest],
        "ranks": [
            {"rank": rank, "made": vars(cost), "formula": vars(candidates[nearest][rank])}
            for rank, cost in enumerate(found)
        ],
    }


def is_cost(value: Any) -> bool:
    """Whether a rank has answered with calls and bytes."""
    names = {"calls", "bytes_sent", "bytes_received"}
    return isinstance(value, dict) and set(value) == names and all(type(n) is int and n >= 0 for n in value.values())


def _distance(found: Sequence[Cost], expected: Sequence[Cost]) -> float:
    pairs = [
        pair
        for mine, other in zip(found, expected, strict=True)
        for pair in zip(vars(mine).values(), vars(other).values(), strict=True)
    ]
    # Of numbers from a few calls to millions of bytes, and of zeros.
    return sum(abs(math.log((mine + 1) / (other + 1))) for mine, other in pairs)
