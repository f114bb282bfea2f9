"""The bytes that a rank holds, counted from its tensors: by category, each storage once."""

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cos598d.parallel import Parallel
from cos598d.zero.unread import Unread

CONTAINERS = dict | list | tuple | set | deque


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
    if isinstance(thing, torch.Tensor) and thing.layout == torch.sparse_coo:
        thing = [thing._indices(), thing._values()]
    if isinstance(thing, torch.Tensor):
        storage = getattr(thing, "_local_tensor", thing).untyped_storage()
        if not isinstance(thing, Unread) and storage.data_ptr() not in seen:  # it stands for what has no memory
            seen.add(storage.data_ptr())
            yield storage.nbytes()
    elif id(thing) not in seen:
        seen.add(id(thing))
        is_ours = type(thing).__module__.startswith("cos598d.") and not isinstance(thing, nn.Module | type)
        for inside in gc.get_referents(thing) if is_ours or isinstance(thing, CONTAINERS) else ():
            yield from _sizes(inside, seen)
