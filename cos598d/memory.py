"""The bytes that a rank holds, counted from its tensors: by category, each storage once."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cos598d.parallel import Parallel


def held(parallel: Parallel) -> dict[str, int]:
    """The bytes of weights, gradients, optimizer state and the sync's buffers. Just before a step all of them exist.

    Memory inside a library's own code, such as the buckets of torch's DDP, is in no category.
    """
    optimizer: Any = parallel.optimizer
    own = [*parallel.module.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    things = {
        "parameters": own,
        "gradients": [p.grad for p in own],
        "optimizer": list(optimizer.state.values()),
        "buckets": parallel.sync,
    }
    seen: set[int] = set()
    return {category: sum(_sizes(thing, seen)) for category, thing in things.items()}


def _sizes(thing: Any, seen: set[int]) -> Iterator[int]:
    """The bytes of each storage in tensors, lists, mappings and our own objects, but not in modules."""
    if isinstance(thing, torch.Tensor):
        parts = [thing._indices(), thing._values()] if thing.layout == torch.sparse_coo else [thing]
        for part in parts:
            try:
                storage = getattr(part, "_local_tensor", part).untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a gradient that refuses to be read has no memory
                continue
            if place not in seen:
                yield size
            seen.add(place)
    elif id(thing) not in seen:
        seen.add(id(thing))
        if type(thing).__module__.startswith("cos598d.") and not isinstance(thing, nn.Module | type):
            thing = getattr(thing, "__dict__", {})
        if isinstance(thing, dict):
            thing = [*thing.keys(), *thing.values()]
        if isinstance(thing, list | tuple | set | deque):
            for inside in thing:
                yield from _sizes(inside, seen)
