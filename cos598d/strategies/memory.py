"""The bytes that a rank holds, counted from tensors by category: now, and at the peak of a step."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from cos598d.terminal import own_code
from cos598d.world.limits import malloced_bytes

# The modules in which a sync's parts are defined: this library's, and a user's file.
_SYNCS = ("cos598d.sync", own_code.__name__)


def count_memory(**categories: Iterable[torch.Tensor]) -> dict[str, int]:
    """The bytes of each category's storages. A storage in several categories counts in the first only."""
    seen: set[int] = set()
    found = {}
    for category, tensors in categories.items():
        found[category] = 0
        for tensor in chain.from_iterable(map(_dense_parts, tensors)):
            storage = tensor.untyped_storage()
            size, place = storage.nbytes(), storage.data_ptr()
            if size and place not in seen:
                seen.add(place)
                found[category] += size
    return found


def allocated_bytes(device: torch.device) -> int | None:
    """The bytes in use of a GPU by tensors, or of this process by malloc; None where malloc does not tell."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else malloced_bytes()


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, mappings and objects of this library or of a user's sync, except those of modules.

    Circular references are allowed.
    """
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        kind = _kinds.get(type(one))
        if kind is None:
            kind = _kinds[type(one)] = _kind_of(type(one))
        if kind == "tensor":
            yield one
        elif kind and id(one) not in seen:
            seen.add(id(one))
            left.extend(one if kind == "items" else one.values() if kind == "mapping" else vars(one).values())


_kinds: dict[type, str] = {}  # a cache, since a watched step asks often


def _kind_of(kind: type) -> str:
    """Which kind of container a type is, or "" if it can hold no tensors."""
    if issubclass(kind, torch.Tensor):
        return "tensor"
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, (list, tuple, set, deque)):
        return "items"
    is_ours = kind.__module__.startswith(_SYNCS) and not issubclass(kind, nn.Module)
    return "object" if is_ours and kind.__dictoffset__ else ""


class Peak:
    """The memory of a rank at its peak, over all moments at which `look` is called.

    While it is `watching`, it calls `look` itself: after the forward of every module with parameters, before each
    module's backward, and before a parameter's new gradient is added to .grad. That gradient counts too.

    `held` are the counted categories when they are most. `with_activations` is the same for all bytes: `allocated`
    gives those in use, or None, and those that came since `watching` began, and are in no category, are "activations".
    """

    def __init__(self, memory: Callable[[], dict[str, int]], allocated: Callable[[], int | None] = lambda: None):
        self._memory, self._allocated = memory, allocated
        self._others: int | None = None  # of what is in use, before the first forward
        self.held: dict[str, int] = {}
        self.with_activations: dict[str, int] = {}  # {} if `allocated` gives None

    def look(self, *_: Any, gradient_bytes: int = 0) -> None:
        """Compare the memory held now plus `gradient_bytes` of a gradient that no category holds yet."""
        found = self._memory()
        if gradient_bytes:
            found = found | {"gradients": found.get("gradients", 0) + gradient_bytes}
        if sum(found.values()) > sum(self.held.values()):
            self.held = found
        if self._others is not None:
            found = found | {"activations": max(0, self._uncounted(found) - self._others)}
            if sum(found.values()) > sum(self.with_activations.values()):
                self.with_activations = found

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context for forward and backward. It costs some milliseconds per module and parameter."""
        self._others = None if self._allocated() is None else self._uncounted(self._memory())
        self._handles = {0: register_module_forward_hook(self._after_forward)}
        try:
            yield
        finally:
            for handle in self._handles.values():
                handle.remove()
            self._others = None

    def _uncounted(self, held: Mapping[str, int]) -> int:
        return (self._allocated() or 0) - sum(held.values())

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        own = list(module.parameters(recurse=False))
        if not own:
            return
        self.look()
        for parameter in own:
            if parameter.requires_grad and id(parameter) not in self._handles:
                self._handles[id(parameter)] = parameter.register_hook(
                    lambda gradient: self.look(gradient_bytes=_bytes_of(gradient))
                )
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                # Runs after the tensor's own hooks, in which a strategy may gather what backward needs.
                leaf.grad_fn.register_prehook(self.look)
                if self._others is not None:  # what an operation's backward makes is there together with what it takes
                    for node in (leaf.grad_fn, *(before for before, _ in leaf.grad_fn.next_functions if before)):
                        node.register_hook(self.look)


def _bytes_of(gradient: torch.Tensor) -> int:
    return sum(part.nbytes for part in _dense_parts(gradient))


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensor itself; for a sparse one, its indices and values."""
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else (tensor,)
