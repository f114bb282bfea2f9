"""On a rank under test: notices calls of torch.distributed that bypass `comm`, with their line."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

DIRECT = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "isend", "irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("batch_isend_irecv", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("reduce_scatter", "reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base"),
)
# The functions below those, and the methods of a process group.
OF_GROUPS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
# The operators below the functions that return tensors (made for compilers), by namespace.
OPERATORS = {
    "_c10d_functional": (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "broadcast", "broadcast_", "all_to_all_single"),
        *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor"),
        "reduce_scatter_tensor_coalesced",
    ),
    "_c10d_functional_autograd": ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
}
# Modules in which torch calls torch.distributed for its caller.
FOR_OTHERS = ("torch.distributed.nn.functional", "torch.distributed._functional_collectives")


def trace_direct_calls(notice: Callable[[str], None]) -> None:
    """Call `notice` with "all_reduce in line 7" whenever a file that is not ours or torch's calls torch.distributed.

    It covers its functions, those that return tensors, their operators, and a process group's methods.
    """

    def watched(name: str, original: Callable, depth: int = 1) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            caller = _whose(sys._getframe(depth))
            if caller and not _is_of(caller, "torch.", "cos598d."):
                notice(f"{name} in line {caller.f_lineno}")
            return original(*arguments, **options)

        return call

    for name in DIRECT:
        wrapper = watched(name, getattr(dist, name))
        setattr(dist, name, wrapper)
        setattr(dist.distributed_c10d, name, wrapper)
    for owner in (dist.ProcessGroup, Backend):
        for name in OF_GROUPS:
            if name in vars(owner):  # not every version of torch has all of them
                setattr(owner, name, watched(name, getattr(owner, name)))
    for namespace, names in OPERATORS.items():
        operators = getattr(torch.ops, namespace)
        for name in names:
            if hasattr(operators, name):
                operator = getattr(operators, name)
                setattr(operators, name, _Watched(operator, watched(name, operator, depth=2)))


class _Watched:
    """One of torch's operators, with a watched call."""

    def __init__(self, operator: Any, call: Callable):
        self._operator, self._call = operator, call

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def _whose(frame: FrameType) -> FrameType | None:
    """The frame that made the call: torch's functions with a gradient call it for their own caller."""
    found: FrameType | None = frame
    if _is_of(frame, *FOR_OTHERS):
        while found and _is_of(found, "torch."):
            found = found.f_back
    return found


def _is_of(frame: FrameType, *packages: str) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith(packages) and ":" not in module
