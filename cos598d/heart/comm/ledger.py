"""Every collective that this process makes, as torch's dispatcher sees it: one row per call, with its bytes and seconds.

Nothing of torch.distributed is replaced. A kernel in front of the backend's gets each call, passes it on unchanged and
writes it down. So it does not matter who calls: a sync, a student's file, FSDP, or DDP's reducer in C++.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cos598d.heart.comm.gloo import bytes_moved
from cos598d.records.conventions import AGREEMENT, BUFFERS, GRADIENTS


class _Operator(NamedTuple):
    """An operator of the dispatcher: its collective, and the places of this rank's tensors, the group and the root."""

    op: str
    payload: int
    group: int
    root: int | None = None


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", 0, 1),
    "broadcast_": _Operator("broadcast", 0, 1, 2),
    "reduce_": _Operator("reduce", 0, 1, 3),
    "allgather_": _Operator("all_gather", 1, 2),
    "_allgather_base_": _Operator("all_gather", 1, 2),
    "reduce_scatter_": _Operator("reduce_scatter", 1, 2),
    "_reduce_scatter_base_": _Operator("reduce_scatter", 1, 2),
    "gather_": _Operator("gather", 1, 2, 3),
    "scatter_": _Operator("scatter", 0, 2, 3),
    "alltoall_base_": _Operator("all_to_all", 1, 2),
    "send": _Operator("send", 0, 1, 2),
    "recv_": _Operator("recv", 0, 1, 2),
}


@dataclass(slots=True)
class Row:
    """One call of this rank. `iteration` counts from 1; 0 is before training. `bytes_sent` and `bytes_received` are this
    rank's, by the algorithm's formula. `seconds` is from the call to its completion, on any thread; None while it runs,
    and if the backend does not report it. `messages`: how many this rank sent, in a collective made of messages."""

    iteration: int
    purpose: str
    op: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    payload_bytes: int
    bytes_sent: int
    bytes_received: int
    started: float
    seconds: float | None = None
    messages: int = 0


@dataclass
class Ledger:
    """The rows of one process, in the order of its calls. `with ledger:` around a training writes them down."""

    rows: list[Row] = field(default_factory=list)
    iteration: int = 0
    _call: tuple[str, str] | None = None  # the purpose and tensor of the calls that are made now
    _composed: Row | None = None  # a collective that is being made of messages
    _buckets: int = 0  # of this iteration, sent by calls without a name

    def begin(self, iteration: int) -> None:
        """The next rows belong to this iteration."""
        self.iteration, self._buckets = iteration, 0

    def __enter__(self) -> "Ledger":
        self._library = torch.library.Library("c10d", "IMPL")
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for name, operator in _OPERATORS.items():
            overload = getattr(torch.ops.c10d, name).default
            kernel = functools.partial(self._kernel, overload, below, operator)
            self._library.impl(name, kernel, "BackendSelect", with_keyset=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._library._destroy()

    @contextlib.contextmanager
    def naming(self, tensor: str, purpose: str = GRADIENTS) -> Iterator[None]:
        """A context in which calls are about `tensor`, for a `purpose`. Outside of any, they are numbered buckets."""
        before, self._call = self._call, (purpose, tensor)
        try:
            yield
        finally:
            self._call = before

    @contextlib.contextmanager
    def composing(self, op: str, tensor: torch.Tensor, name: str, purpose: str = GRADIENTS) -> Iterator[None]:
        """A context whose messages together are one collective `op` on `tensor`: one row, with what was really sent."""
        self._composed = self._row((purpose, name), op, [tensor], 0, 0)
        try:
            yield
        finally:
            row, self._composed = self._composed, None
            row.seconds = time.perf_counter() - row.started
            self.rows.append(row)

    def sent(self, *purposes: str, iteration: int | None = None) -> int:
        """The bytes that this rank has sent for these purposes (default: all), in an iteration or in all of them."""
        chosen = (row for row in self.rows if iteration in (None, row.iteration))
        return sum(row.bytes_sent for row in chosen if row.purpose in purposes or not purposes)

    def _kernel(self, overload: Any, below: Any, operator: _Operator, keyset: Any, *arguments: Any) -> Any:
        tensors = list(_flat(arguments[operator.payload]))
        group = dist.ProcessGroup.unbox(arguments[operator.group])
        root = 0 if operator.root is None else int(arguments[operator.root])
        payload = sum(tensor.nbytes for tensor in tensors)
        sent, received = bytes_moved(operator.op, payload, group.size(), group.rank(), root)
        if self._composed is not None and operator.op in ("send", "recv"):
            self._composed.messages += operator.op == "send"
            self._composed.bytes_sent += sent
            self._composed.bytes_received += received
            return overload.redispatch(keyset & below, *arguments)
        row = self._row(self._call or self._default(operator.op, tensors), operator.op, tensors, sent, received)
        result = overload.redispatch(keyset & below, *arguments)
        if sent or received:
            self.rows.append(row)
            _when_done(result, lambda: setattr(row, "seconds", time.perf_counter() - row.started))
        return result

    def _row(self, call: tuple[str, str], op: str, tensors: list[torch.Tensor], sent: int, received: int) -> Row:
        shape = tuple(tensors[0].shape) if len(tensors) == 1 else (sum(tensor.numel() for tensor in tensors),)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        payload = sum(tensor.nbytes for tensor in tensors)
        return Row(self.iteration, call[0], op, call[1], shape, dtype, payload, sent, received, time.perf_counter())

    def _default(self, op: str, tensors: list[torch.Tensor]) -> tuple[str, str]:
        """What a library's own call is about, such as one of DDP's reducer."""
        if op == "broadcast":
            return BUFFERS, "buffers"
        if tensors and not tensors[0].is_floating_point():
            return AGREEMENT, "ranks that used each parameter"
        self._buckets += 1
        return GRADIENTS, f"bucket {self._buckets - 1}"


def _when_done(result: Any, then: Any) -> None:
    """Call `then` on the backend's thread when the work is done, if the backend tells."""
    last = result[-1] if isinstance(result, tuple | list) and result else result
    if isinstance(last, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):  # gloo's messages have no future
            dist.Work.unbox(last).get_future().add_done_callback(lambda _: then())


def _flat(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
