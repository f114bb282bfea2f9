"""On a rank under trial: a trace of every call before it is made, and of calls that go round `comm`."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from cos598d.comm.calls import Call
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.comm.messages import PointToPointCollective

MOST_CALLS = 20_000  # of which notes are kept
DIRECT = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "isend", "irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("batch_isend_irecv", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("reduce_scatter", "reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base"),
)
# What those call, and what whoever has a process group can call of it.
OF_GROUPS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
# The operators below the functions that return a tensor and no work, as compilers like them, by namespace.
OPERATORS = {
    "_c10d_functional": (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "broadcast", "broadcast_", "all_to_all_single"),
        *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor"),
        "reduce_scatter_tensor_coalesced",
    ),
    "_c10d_functional_autograd": ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
}
# Where torch calls torch.distributed for whoever calls that.
FOR_OTHERS = ("torch.distributed.nn.functional", "torch.distributed._functional_collectives")


class TracedCommunicator(Communicator):
    """A communicator that does the same, and writes each call into a file before making it.

    So the grader can say which calls met, also where ranks wait for each other for ever or are ended by the library.
    """

    def __init__(self, comm: Communicator, path: Path):
        vars(self).update(vars(comm))
        self._notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._count = 0
        self._started: list[tuple[str, Call]] = []

    def all_reduce(self, tensor: torch.Tensor, name: str, **options: Any) -> Call:
        self._note("all_reduce", tensor, name)
        return self._keep(f"all_reduce of {name}", super().all_reduce(tensor, name, **options))

    def broadcast(self, tensor: torch.Tensor, name: str, **options: Any) -> None:
        self._note("broadcast", tensor, name, options)
        super().broadcast(tensor, name, **options)

    def gather(self, tensor: torch.Tensor, name: str, **options: Any) -> list[torch.Tensor] | None:
        self._note("gather", tensor, name, options)
        return super().gather(tensor, name, **options)

    def scatter(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, name: str, **options: Any) -> None:
        self._note("scatter", tensor, name, options)
        super().scatter(tensor, parts, name, **options)

    def reduce(self, tensor: torch.Tensor, name: str, **options: Any) -> None:
        self._note("reduce", tensor, name, options)
        super().reduce(tensor, name, **options)

    def all_gather(self, tensor: torch.Tensor, name: str, **options: Any) -> tuple[list[torch.Tensor], Call]:
        self._note("all_gather", tensor, name)
        parts, call = super().all_gather(tensor, name, **options)
        return parts, self._keep(f"all_gather of {name}", call)

    def compose(self, op: str, tensor: torch.Tensor, name: str, **options: Any) -> PointToPointCollective:
        self._note(op, tensor, name)
        return super().compose(op, tensor, name, **options)

    def not_waited_for(self) -> list[str]:
        """The calls since this was last asked that are still not waited for."""
        started, self._started = self._started, []
        return [what for what, call in started if call.is_under_way]

    def _keep(self, what: str, call: Call) -> Call:
        if call.is_under_way:
            self._started.append((what, call))
        return call

    def _note(self, op: str, tensor: torch.Tensor, name: str, options: dict[str, Any] | None = None) -> None:
        self._count += 1
        if self._count <= MOST_CALLS:
            call = [op, str(name), list(tensor.shape), dtype_name(tensor.dtype), (options or {}).get("root", 0)]
            os.write(self._notes, json.dumps(call).encode() + b"\n")


def trace_direct_calls(notice: Callable[[str], None]) -> None:
    """Call `notice` with "all_reduce in line 7" whenever a file that is not ours or torch's calls torch.distributed.

    By its functions, by those that return tensors, by their operators or by a process group's methods.
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
            if name in vars(owner):  # not every version of torch has all
                setattr(owner, name, watched(name, getattr(owner, name)))
    for namespace, names in OPERATORS.items():
        operators = getattr(torch.ops, namespace)
        for name in names:
            if hasattr(operators, name):
                operator = getattr(operators, name)
                setattr(operators, name, _Watched(operator, watched(name, operator, depth=2)))


class _Watched:
    """One of torch's operators, which is something else when it is called."""

    def __init__(self, operator: Any, call: Callable):
        self._operator, self._call = operator, call

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def _whose(frame: FrameType) -> FrameType | None:
    """The frame whose call it is: a function that torch offers with a gradient makes it for its own caller."""
    found: FrameType | None = frame
    if _is_of(frame, *FOR_OTHERS):
        while found and _is_of(found, "torch."):
            found = found.f_back
    return found


def _is_of(frame: FrameType, *packages: str) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith(packages) and ":" not in module
