"""The collectives. Each call is entered in the ledger under the name of its tensor.

The bytes are those of gloo's algorithms (`cos598d/comm/gloo.py`). nccl chooses other algorithms by size and links, and
does not report them. Its calls are assumed to send as many bytes as gloo's. A sync's own collectives consist of
messages (`Communicator.composed`), which are counted as they are sent.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cos598d.comm.calls import Call
from cos598d.comm.endpoint import Endpoint, as_bytes, as_dense, from_bytes
from cos598d.comm.gloo import bytes_moved
from cos598d.comm.ledger import size_in_bytes
from cos598d.comm.messages import PointToPointCollective
from cos598d.records.conventions import GRADIENTS


class Communicator(Endpoint):
    """One rank's collectives over one process group.

    In a world of one rank nothing is sent: results are the rank's own tensors, and the ledger stays empty.

    gloo reads a tensor's memory from its first element on, ignores its strides, and supports few dtypes. So a tensor
    that is not contiguous is sent as a dense copy, and tensors that are not summed are sent as bytes.
    """

    def all_reduce(
        self, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS, async_op: bool = False, op: Any = None
    ) -> Call:
        """Put the sum (or `op`, a torch.distributed.ReduceOp) over all ranks into `tensor` on each; return the call."""
        dense = as_dense(tensor)
        return self._start(
            lambda: dist.all_reduce(dense, op=op or dist.ReduceOp.SUM, group=self.group, async_op=True),
            ("all_reduce", tensor, name, purpose),
            async_op=async_op,
            dense=dense,
        )

    def broadcast(self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS) -> None:
        """Put the root's `tensor` into `tensor` on each rank."""
        dense = as_dense(tensor)
        self._start(
            lambda: dist.broadcast(as_bytes(dense), src=self.peer(root), group=self.group, async_op=True),
            ("broadcast", tensor, name, purpose),
            root,
            dense=dense,
        )

    def gather(
        self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS
    ) -> list[torch.Tensor] | None:
        """The tensors of all ranks, in order of rank, at the root; None elsewhere."""
        if self.world_size == 1:
            return [tensor]
        travelling = self.to_host(as_bytes(as_dense(tensor)))
        parts = [torch.empty_like(travelling) for _ in range(self.world_size)] if self.rank == root else None
        self._start(
            lambda: dist.gather(travelling, parts, dst=self.peer(root), group=self.group, async_op=True),
            ("gather", tensor, name, purpose),
            root,
        )
        return None if parts is None else [from_bytes(part, tensor).to(tensor.device) for part in parts]

    def scatter(
        self,
        tensor: torch.Tensor,
        parts: Sequence[torch.Tensor] | None,
        name: str,
        *,
        root: int = 0,
        purpose: str = GRADIENTS,
    ) -> None:
        """Put `parts[r]` of the root into `tensor` of rank r. `parts` is None elsewhere."""
        if self.world_size == 1 and parts is not None:
            tensor.copy_(parts[0])
            return
        landing = self.to_host(as_bytes(as_dense(tensor)))
        is_sent = self.rank == root and parts is not None
        sources = [self.to_host(as_bytes(as_dense(part))) for part in parts or ()] if is_sent else None
        self._start(
            lambda: dist.scatter(landing, sources, src=self.peer(root), group=self.group, async_op=True),
            ("scatter", tensor, name, purpose),
            root,
        )
        if landing.data_ptr() != tensor.data_ptr():
            tensor.copy_(from_bytes(landing, tensor))

    def reduce(self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS) -> None:
        """Put the sum over all ranks into the root's `tensor`. Other ranks' tensors are undefined afterwards."""
        dense = as_dense(tensor)
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        self._start(
            lambda: dist.reduce(real, dst=self.peer(root), group=self.group, async_op=True),
            ("reduce", tensor, name, purpose),
            root,
            dense=dense,
        )

    def all_gather(
        self, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS, async_op: bool = False
    ) -> tuple[list[torch.Tensor], Call]:
        """Start an all-gather. Return all ranks' tensors, of one shape and in rank order, and the call.

        The call has ended, unless `async_op`: then wait for it.
        """
        if self.world_size == 1:
            return [tensor], Call.done()
        dense = as_dense(tensor)
        parts = [torch.empty_like(dense) for _ in range(self.world_size)]
        call = self._start(
            lambda: dist.all_gather(parts, dense, group=self.group, async_op=True),
            ("all_gather", tensor, name, purpose),
            async_op=async_op,
        )
        return parts, call

    def compose(self, op: str, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS) -> PointToPointCollective:
        """A collective `op` on `tensor` that the caller builds from messages, and ends."""
        return PointToPointCollective(self, op, tensor, name, purpose)

    @contextlib.contextmanager
    def composed(
        self, op: str, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS
    ) -> Iterator[PointToPointCollective]:
        """As `compose`; the context's end ends the collective."""
        call = self.compose(op, tensor, name, purpose=purpose)
        yield call
        call.end()

    def _start(
        self,
        collective: Callable[[], Any],
        entry: tuple[str, torch.Tensor, str, str],
        root: int = 0,
        *,
        async_op: bool = False,
        dense: torch.Tensor | None = None,
    ) -> Call:
        """Start a collective, and wait for it unless it is `async_op`.

        entry: the operation, the tensor, its name and the purpose, for the ledger.
        dense: a contiguous copy that is sent instead of the tensor. The result is copied back.
        """
        if self.world_size == 1:
            return Call.done()
        started = self.time.now()
        op, tensor, *_ = entry
        moved = bytes_moved(op, size_in_bytes(tensor), self.world_size, self.rank, root)
        landing = None if dense is None or dense is tensor else (dense, tensor)
        call = Call(self.ledger, collective(), self.row(*entry, *moved), self.time, started, landing)
        if not async_op:
            call.wait()
        return call
