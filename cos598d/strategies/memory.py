"""Bytes that a rank holds, counted from tensors by category."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def count_memory(**categories: Iterable[torch.Tensor]) -> dict[str, int]:
    """The bytes of each category's storages; a storage that belongs to several counts in the first alone."""
    seen: set[int] = set()
    found = {}
    for category, tensors in categories.items():
        found[category] = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[category] += storage.nbytes()
    return found


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer remembers."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, mappings and objects of this library; a module's are not its holder's."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for part in thing.values():
            yield from tensors_in(part)
    elif isinstance(thing, (list, tuple, set)):
        for part in thing:
            yield from tensors_in(part)
    elif type(thing).__module__.startswith("cos598d.sync") and not isinstance(thing, nn.Module):
        yield from tensors_in(vars(thing)) if hasattr(thing, "__dict__") else ()
