"""Every collective call of this process, as torch's dispatcher sees it: DDP's reducer, functional calls, async ones.

No function of torch.distributed is replaced. A kernel in front of the backend's gets every call, passes it on
unchanged, and reports it to the listeners. So it does not matter how a script imported a function, or whether C++ calls
it. Without a listener there is no kernel.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

BARRIER = "barrier"


class Operator(NamedTuple):
    """An operator of the dispatcher: its collective, and the indices of its arguments. `root` is None without one; for
    a call between two ranks it is the other rank.

    `payload` is the argument with this rank's tensors, `group` the process group, `reduces` the ReduceOp.
    """

    op: str
    payload: int
    group: int
    root: int | None = None
    reduces: int | None = None


OPERATORS = {
    "allreduce_": Operator("all_reduce", 0, 1, reduces=2),
    "allreduce_coalesced_": Operator("all_reduce", 0, 1, reduces=2),
    "broadcast_": Operator("broadcast", 0, 1, 2),
    "reduce_": Operator("reduce", 0, 1, 3, reduces=2),
    "allgather_": Operator("all_gather", 1, 2),
    "_allgather_base_": Operator("all_gather", 1, 2),
    "allgather_coalesced_": Operator("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 1, 2),
    "reduce_scatter_": Operator("reduce_scatter", 1, 2),
    "_reduce_scatter_base_": Operator("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 1, 2),
    "gather_": Operator("gather", 1, 2, 3),
    "scatter_": Operator("scatter", 0, 2, 3),
    "alltoall_": Operator("all_to_all", 1, 2),
    "alltoall_base_": Operator("all_to_all", 1, 2),
    "barrier": Operator(BARRIER, 0, 1),
    "monitored_barrier_": Operator(BARRIER, 0, 1),
    "send": Operator("send", 0, 1, 2),
    "recv_": Operator("recv", 0, 1, 2),
    "recv_any_source_": Operator("recv", 0, 1),
}
# Modules of torch.distributed's functions.
FUNCTIONS = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")


@dataclass(slots=True, eq=False)
class DispatchedCall:
    """One call of this rank. op: the collective, named as in `bytes_moved`.

    tensors: this rank's part; in a reduce-scatter and an all-to-all the parts for all ranks. adds: whether they are
    added up or averaged. caller: the frame that called it. began: when, by time.perf_counter. work: what to wait for,
    if anything; None before the call is made.
    """

    op: str
    tensors: list[torch.Tensor]
    group: dist.ProcessGroup
    root: int
    adds: bool
    caller: FrameType | None
    began: float = 0.0
    work: Any = None

    @property
    def function(self) -> str:
        """The function of torch.distributed that a script called; "" if none was, as for a call from C++."""
        function, frame = "", self.caller
        while frame is not None and frame.f_globals.get("__name__") in FUNCTIONS:
            name = frame.f_code.co_name
            function = name if self.op in name and "object" not in name else function  # whose calls count individually
            frame = frame.f_back
        return function

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group; for a group that torch.distributed does not know, its own indices."""
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except (KeyError, ValueError, RuntimeError):
            return tuple(range(self.group.size()))


Listener = Callable[[DispatchedCall], None]
_ADDING = (0, 1)  # ReduceOp.SUM and ReduceOp.AVG, by torch's numbers
_listeners: list[tuple[Listener, Listener | None]] = []
_library: torch.library.Library | None = None


@contextlib.contextmanager
def listening(listener: Listener, before: Listener | None = None) -> Iterator[None]:
    """A context in which `listener` gets every call of this process, after the call and on the same thread.

    `before` gets the same object before the call is made, also of a call that then raises an exception.
    """
    global _library  # noqa: PLW0603 - the dispatcher is this process's, too
    _listeners.append((listener, before))
    if _library is None:
        _library = _installed()
    try:
        yield
    finally:
        _listeners.remove((listener, before))
        if not _listeners and _library is not None:
            _library._destroy()
            _library = None


def _installed() -> torch.library.Library:
    library = torch.library.Library("c10d", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for name, operator in OPERATORS.items():
        overload = getattr(getattr(torch.ops.c10d, name, None), "default", None)
        if overload is not None:
            kernel = functools.partial(_kernel, overload, below, operator)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library


def _kernel(overload: Any, below: Any, operator: Operator, keyset: Any, *arguments: Any) -> Any:
    tensors = [] if operator.op == BARRIER else _flat(arguments[operator.payload])
    root = 0 if operator.root is None else int(arguments[operator.root])
    group = dist.ProcessGroup.unbox(arguments[operator.group])
    adds = operator.reduces is not None and arguments[operator.reduces].op() in _ADDING
    call = DispatchedCall(operator.op, tensors, group, root, adds, sys._getframe().f_back)
    listeners = dict.fromkeys(_listeners)  # each once, however often it is registered
    for _, before in listeners:
        if before is not None:
            before(call)
    call.began = time.perf_counter()
    result = overload.redispatch(keyset & below, *arguments)
    last = result[-1] if isinstance(result, tuple | list) and result else result
    call.work = dist.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None
    for listener, _ in listeners:
        listener(call)
    return result


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors in a value of tensors and lists."""
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []
