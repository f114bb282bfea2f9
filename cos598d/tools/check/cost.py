"""A sync's calls and bytes in one step, compared with the formulas of the registered syncs."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from cos598d.sync import SYNCS, get_sync
from cos598d.sync.cost import Cost
from cos598d.tools.check.toy import plain_model


def sizes_of(model: nn.Module) -> list[tuple[int, int]]:
    """Elements and bytes per element of its parameters."""
    return [(p.numel(), p.element_size()) for p in model.parameters()]


def compare(name: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measured cost of every rank, and the cost by formula of the nearest registered sync.

    answers: `ranks.cost_of_step` of each rank. If your own class has `calls`, it is compared with these. Otherwise
    nearest is the sync whose calls and bytes differ least, as ratios, over all ranks. Of equal ones, it is the sync
    itself, then the first in the registry.
    """
    sizes = sizes_of(plain_model())
    made = [each["made"] for each in answers]
    found = [Cost(**each) for each in made]
    if name not in SYNCS and all(each["stated"] for each in answers):
        return _beside(name, sizes, found, [Cost(**each["stated"]) for each in answers])
    candidates: dict[str, list[Cost]] = {}
    for other in sorted(SYNCS, key=lambda each: each != name):
        costs = [get_sync(other).expected(sizes, len(made), rank) for rank in range(len(made))]
        stated = [cost for cost in costs if cost and cost.calls is not None]
        if stated == costs:
            candidates[other] = stated
    nearest = min(candidates, key=lambda each: _distance(found, candidates[each]))
    return _beside(nearest, sizes, found, candidates[nearest])


def _beside(nearest: str, sizes: Sequence[tuple[int, int]], found: list[Cost], formula: list[Cost]) -> dict[str, Any]:
    return {
        "world_size": len(found),
        "gradient_bytes": sum(elements * size for elements, size in sizes),
        "tensors": len(sizes),
        "nearest": nearest,
        "is_equal": found == formula,
        "ranks": [
            {"rank": rank, "made": vars(cost), "formula": vars(formula[rank])} for rank, cost in enumerate(found)
        ],
    }


def is_cost(value: Any) -> bool:
    """Whether a rank has answered with calls and bytes, as `ranks.cost_of_step` does."""
    names = {"calls", "bytes_sent", "bytes_received"}

    def counts(cost: Any) -> bool:
        return isinstance(cost, dict) and set(cost) == names and all(type(n) is int and n >= 0 for n in cost.values())

    is_answer = isinstance(value, dict) and set(value) == {"made", "stated"}
    return is_answer and counts(value["made"]) and (value["stated"] is None or counts(value["stated"]))


def _distance(found: Sequence[Cost], expected: Sequence[Cost]) -> float:
    pairs = [
        pair
        for mine, other in zip(found, expected, strict=True)
        for pair in zip(vars(mine).values(), vars(other).values(), strict=True)
    ]
    # Numbers range from a few calls to millions of bytes, and include zeros.
    return sum(abs(math.log((mine + 1) / (other + 1))) for mine, other in pairs)
