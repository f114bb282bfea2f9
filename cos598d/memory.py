"""The bytes that a rank holds, counted from its tensors: by category, each storage once."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from cos598d.parallel import Parallel


def held(parallel: Parallel) -> dict[str, int]:
    """The bytes of weights, gradients, optimizer state and the sync's buffers. Just before a step all of them exist.

    Memory inside a library's own code, such as the buckets of torch's DDP, is in no category.
    """
    optimizer: Any = parallel.optimizer
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    own = [*parallel.module.parameters(), *stepped]
    categories = {
        "parameters": own,
        "gradients": [p.grad for p in own if p.grad is not None],
        "optimizer": [value for state in optimizer.state.values() for value in state.values()],
        "buckets": tensors_in(parallel.sync, set()),
    }
    seen: set[int] = set()
    return {name: sum(_bytes_once(thing, seen) for thing in things) for name, things in categories.items()}


def tensors_in(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in lists, mappings and our own objects, except those of modules."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif id(thing) not in seen:
        seen.add(id(thing))
        inside: Iterable[Any] = ()
        if isinstance(thing, dict):
            inside = [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | deque):
            inside = thing
        elif type(thing).__module__.startswith("cos598d.") and not isinstance(thing, nn.Module | type):
            inside = getattr(thing, "__dict__", {}).values()
        for one in inside:
            yield from tensors_in(one, seen)


def _bytes_once(thing: Any, seen: set[int]) -> int:
    """The bytes of a tensor's memory; 0 if they are counted already. A sparse one has indices and values."""
    if not isinstance(thing, torch.Tensor):
        return 0
    if thing.layout == torch.sparse_coo:
        return _bytes_once(thing._indices(), seen) + _bytes_once(thing._values(), seen)
    try:
        storage = getattr(thing, "_local_tensor", thing).untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a gradient that refuses to be read has no memory
        return 0
    if not size or place in seen:
        return 0
    seen.add(place)
    return size
