"""What other people's engines send through torch.distributed, entered in the ledger as our own calls are."""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from cos598d.comm.communicator import Communicator
from cos598d.comm.gloo import all_reduce_bytes, broadcast_bytes, reduce_bytes, root_bytes
from cos598d.comm.ledger import Row, dtype_name, size_in_bytes
from cos598d.records.conventions import AGREEMENT, GRADIENTS, PARAMETERS

# The arguments whose tensors are this rank's part, or all of it, as the formulas count them.
PAYLOADS = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "all_to_all_single": "input",
    "all_to_all": "input_tensor_list",
    "send": "tensor",
    "isend": "tensor",
    "recv": "tensor",
    "irecv": "tensor",
}
Purpose = Callable[[str, int], str]  # from a function's name and its payload's elements

_listeners: list[tuple[Communicator, Purpose]] = []
_thread = threading.local()  # .is_inside: in one of these functions, which may call another for the same call


def purpose_in_training(function: str, elements: int) -> str:
    """What a call of an engine is for, in a step: what is summed is gradients, what is handed round is parameters."""
    if elements == 1:  # a norm, or whether it is finite
        return AGREEMENT
    return GRADIENTS if "reduce" in function else PARAMETERS


@contextlib.contextmanager
def watched(comm: Communicator, purpose: Purpose | str = purpose_in_training) -> Iterator[None]:
    """Enter in `comm`'s ledger every call of a torch.distributed function that is made meanwhile, by whichever thread.

    Calls through a Communicator are in it already, and are left out; calls that torch makes in C++ (its DDP's
    reducer) pass no Python function and are not seen. Seconds are not told: many of the calls end later.
    """
    _patch()
    _listeners.append((comm, purpose if callable(purpose) else lambda *_: purpose))
    try:
        yield
    finally:
        _listeners.pop()


@functools.cache
def _patch() -> None:
    """Put listening functions in the place of torch.distributed's, once for all."""
    for name, argument in PAYLOADS.items():
        original = getattr(dist, name, None)
        if original is not None:  # an older torch has not all of them
            listening = _listening(name, argument, original)
            setattr(dist, name, listening)
            setattr(dist.distributed_c10d, name, listening)


def _listening(name: str, argument: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        if not _listeners or getattr(_thread, "is_inside", False):
            return original(*arguments, **options)
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("cos598d.comm."):
            comm, purpose = _listeners[-1]
            bound = signature.bind(*arguments, **options).arguments
            _enter(comm, purpose, name, bound[argument], bound)
        _thread.is_inside = True
        try:
            return original(*arguments, **options)
        finally:
            _thread.is_inside = False

    return call


def _enter(comm: Communicator, purpose: Purpose, name: str, payload: Any, bound: dict[str, Any]) -> None:
    tensors = payload if isinstance(payload, (list, tuple)) else [payload]
    size = sum(size_in_bytes(tensor) for tensor in tensors)
    group = bound.get("group")
    ranks = dist.get_world_size(group)
    if ranks <= 1 or not size:
        return
    elements = sum(tensor.numel() for tensor in tensors)
    comm.ledger.enter(
        Row(
            comm.ledger.iteration,
            purpose(name, elements),
            name,
            f"{name} {len(comm.ledger.rows)}",
            tuple(tensors[0].shape) if len(tensors) == 1 else (elements,),
            dtype_name(tensors[0].dtype),
            size,
            *_moved(name, size, ranks, dist.get_rank(group), _root(bound, group), comm.bytes_are_assumed),
            None,
        )
    )


def _root(bound: dict[str, Any], group: Any) -> int:
    """The rank in the group that a call sends from or to; 0 where the call has none."""
    for name in ("src", "dst"):
        if bound.get(name) is not None:
            return dist.get_group_rank(group, bound[name]) if group is not None else bound[name]
    for name in ("group_src", "group_dst"):
        if bound.get(name) is not None:
            return bound[name]
    return 0


def _moved(name: str, size: int, ranks: int, rank: int, root: int, has_ideal_scatter: bool) -> tuple[int, int]:
    """Bytes sent and received. gloo's reduce-scatter is the ring of its all-reduce; others' send half of that."""
    if name == "all_reduce" or (name.startswith("reduce_scatter") and not has_ideal_scatter):
        return (all_reduce_bytes(size, ranks),) * 2
    if name.startswith(("reduce_scatter", "all_to_all")):
        return (round((ranks - 1) * size / ranks),) * 2
    if name.startswith("all_gather"):
        return ((ranks - 1) * size,) * 2
    if name == "broadcast":
        return broadcast_bytes(size, ranks, (rank - root) % ranks)
    if name == "reduce":
        return reduce_bytes(size, ranks, rank, rank == root)
    if name in ("gather", "scatter"):
        moved = root_bytes(size, ranks, rank == root)
        return (moved, 0) if (name == "scatter") == (rank == root) else (0, moved)
    return (size, 0) if name in ("send", "isend") else (0, size)
