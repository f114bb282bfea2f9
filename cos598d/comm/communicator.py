"""The collectives, each call entered in the ledger under the name of its tensor: everything that travels goes here.

What a rank sends and receives for a payload of S bytes among n ranks (gloo's algorithms, seen on the wire):

    all-reduce   ring: reduce-scatter, then all-gather   every rank sends and receives 2(n-1)/n S
    broadcast    binomial tree from the root             the root sends ceil(log2 n) S, every other rank receives S
    gather       straight to the root                    the root receives (n-1) S, every other rank sends S
    scatter      straight from the root                  the root sends (n-1) S, every other rank receives S
    reduce       ring reduce-scatter, then to the root   all send S but the root, which receives 2(n-1)/n S; more
                                                         for tensors of over 2n MiB, see `reduce_bytes`
    all-gather   ring                                    every rank sends and receives (n-1) S

nccl chooses other algorithms by size and links, and does not tell: its calls are taken to move what gloo's do.
Collectives of a sync's own are composed of messages (`Communicator.composed`), and counted as they are sent.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cos598d.comm.ledger import GRADIENTS, Ledger, Row, dtype_name, size_in_bytes
from cos598d.comm.messages import Composed
from cos598d.comm.moments import HostTime, Moment, Time, time_of
from cos598d.world.meeting import Meeting
from cos598d.world.network import choose_interface

_SEGMENT_BYTES = 1 << 20  # gloo's


def all_reduce_bytes(payload: int, ranks: int) -> int:
    """Bytes that each rank sends (and receives) in a ring all-reduce of `payload` bytes: 2(n-1)/n S."""
    return round(2 * (ranks - 1) * payload / ranks)


def ring_segments(payload: float, ranks: int) -> int:
    """Segments in which gloo's rings move a rank's n-th part of `payload` bytes: of at most 1 MiB, at least two.

    Two are under way at a time, one received while the other is added up (gloo/allreduce.cc).
    """
    return max(math.ceil(payload / (_SEGMENT_BYTES * ranks)), 2)


def broadcast_bytes(payload: int, ranks: int, distance: int) -> tuple[int, int]:
    """Bytes sent and received in a binomial-tree broadcast by the rank `distance` places after the root."""
    children = sum(1 for bit in range(ranks.bit_length()) if distance < 1 << bit and distance + (1 << bit) < ranks)
    return children * payload, 0 if distance == 0 else payload


def root_bytes(payload: int, ranks: int, is_root: bool) -> int:
    """Bytes between the root and the others in a gather or scatter: (n-1) S at the root, S elsewhere."""
    return (ranks - 1) * payload if is_root else payload


def reduce_bytes(payload: int, ranks: int, rank: int, is_root: bool) -> tuple[int, int]:
    """Bytes sent and received in gloo's reduce: a ring reduce-scatter, then the other ranks' parts go to the root.

    Up to 2n MiB that is (n-1)/n S in the ring and S/n to the root. A larger tensor goes round in segments of 1 MiB, of
    which gloo leaves out only the last two of a rank's own part, instead of all of it: S less 2 MiB.
    """
    if ranks == 1:
        return 0, 0
    segment = min(_SEGMENT_BYTES, -(-payload // (2 * ranks)))
    of_a_part = ring_segments(payload, ranks)

    def held(first: int, count: int) -> int:
        return min(payload, (first + count) * segment) - min(payload, first * segment)

    def ring(member: int) -> int:
        return payload - held((member % ranks + 1) * of_a_part - 2, 2)

    parts = [held(member * of_a_part, of_a_part) for member in range(ranks)]
    if is_root:
        return ring(rank), ring(rank + 1) + sum(parts) - parts[rank]
    return ring(rank) + parts[rank], ring(rank + 1)


class Call:
    """A collective under way; `wait` blocks until the result is there, and enters the call in the ledger."""

    def __init__(self, ledger: Ledger, work: dist.Work | None, row: dict[str, Any] | None, time: Time, started: Moment):
        self._ledger, self._work, self._row, self._time, self._started = ledger, work, row, time, started

    @classmethod
    def done(cls) -> "Call":
        """A call that is over, and in the ledger."""
        return cls(Ledger(), None, None, HostTime(), None)

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited for it yet."""
        return self._row is not None

    def wait(self) -> None:
        """Block until the result is in the tensor; on CUDA, whatever this stream does next, not the host.

        nccl's wait makes the stream wait. gloo works on the host: its wait blocks the host while the tensor travels
        from and to host memory, and the stream until it is back on the device.
        """
        if self._row is None:
            return
        if self._work is not None:
            self._work.wait()
        self._ledger.enter_call(self._row, self._time, self._started, self._time.now())
        self._row = None


class Communicator:
    """One rank's collectives over one process group.

    With a world of one rank nothing travels: results are the rank's own tensors, and the ledger stays empty.
    `device` is where this rank's tensors live, `time` tells the moments of its work, `backend` is "gloo" or "nccl".
    """

    def __init__(self, meeting: Meeting | None, backend: str, device: torch.device, ledger: Ledger | None = None):
        self.rank = meeting.identity.rank if meeting else 0
        self.world_size = meeting.identity.world_size if meeting else 1
        self.backend, self.device = backend, device
        self.time = time_of(device)
        self.ledger = ledger or Ledger()
        self._meeting = meeting
        self.group: dist.ProcessGroup | None = None  # torch's default one

    @property
    def timeout_seconds(self) -> float:
        """After how many seconds a collective that does not end is an error; without end for a single rank."""
        return self._meeting.seconds if self._meeting else float("inf")

    @property
    def bytes_are_assumed(self) -> bool:
        """Whether the formulas are another backend's: the bytes of single collectives have then never been counted."""
        return self.backend != "gloo"

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), in order of rank. For small facts: through the store, not measured."""
        return self._meeting.exchange(value) if self._meeting else [value]

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's `value` (JSON) on rank 0, in order of rank; None on the others, which do not wait for it."""
        return self._meeting.collect(value) if self._meeting else [value]

    def peer(self, rank: int) -> int:
        """What torch calls a rank of this group among all processes."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def all_reduce(
        self, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS, async_op: bool = False, op: Any = None
    ) -> Call:
        """Put the sum (or `op`, a torch.distributed.ReduceOp) over all ranks into `tensor` of each; return the call."""
        payload = size_in_bytes(tensor)
        moved = all_reduce_bytes(payload, self.world_size)
        return self._start(
            lambda: dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=self.group, async_op=True),
            ("all_reduce", tensor, name, purpose, moved, moved),
            async_op,
        )

    def broadcast(self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS) -> None:
        """Put the root's `tensor` into `tensor` of each rank."""
        distance = (self.rank - root) % self.world_size
        sent, received = broadcast_bytes(size_in_bytes(tensor), self.world_size, distance)
        self._start(
            lambda: dist.broadcast(tensor, src=self.peer(root), group=self.group, async_op=True),
            ("broadcast", tensor, name, purpose, sent, received),
            False,
        )

    def gather(
        self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS
    ) -> list[torch.Tensor] | None:
        """The tensors of all ranks, in order of rank, at the root; None elsewhere."""
        if self.world_size == 1:
            return [tensor]
        is_root = self.rank == root
        payload = size_in_bytes(tensor)
        moved = root_bytes(payload, self.world_size, is_root)
        started = self.time.now()
        travelling = self.to_host(tensor)
        parts = [torch.empty_like(travelling) for _ in range(self.world_size)] if is_root else None
        sent, received = (0, moved) if is_root else (moved, 0)
        work = dist.gather(travelling, parts, dst=self.peer(root), group=self.group, async_op=True)
        row = self.row("gather", tensor, name, purpose, sent, received)
        Call(self.ledger, work, row, self.time, started).wait()
        return [part.to(tensor.device) for part in parts] if is_root else None

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
        if self.world_size == 1:
            tensor.copy_(parts[0])
            return
        is_root = self.rank == root
        moved = root_bytes(size_in_bytes(tensor), self.world_size, is_root)
        started = self.time.now()
        landing = self.to_host(tensor)
        sources = [self.to_host(part) for part in parts] if is_root else None
        sent, received = (moved, 0) if is_root else (0, moved)
        work = dist.scatter(landing, sources, src=self.peer(root), group=self.group, async_op=True)
        row = self.row("scatter", tensor, name, purpose, sent, received)
        Call(self.ledger, work, row, self.time, started).wait()
        if landing is not tensor:
            tensor.copy_(landing)

    def reduce(self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS) -> None:
        """Put the sum over all ranks into the root's `tensor`; what the others' hold afterwards is undefined."""
        sent, received = reduce_bytes(size_in_bytes(tensor), self.world_size, self.rank, self.rank == root)
        self._start(
            lambda: dist.reduce(tensor, dst=self.peer(root), group=self.group, async_op=True),
            ("reduce", tensor, name, purpose, sent, received),
            False,
        )

    def all_gather(
        self, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS, async_op: bool = False
    ) -> tuple[list[torch.Tensor], Call]:
        """The tensors of all ranks, of one shape, in order of rank, and the call to wait for before they are read."""
        if self.world_size == 1:
            return [tensor], Call.done()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        moved = (self.world_size - 1) * size_in_bytes(tensor)
        call = self._start(
            lambda: dist.all_gather(parts, tensor, group=self.group, async_op=True),
            ("all_gather", tensor, name, purpose, moved, moved),
            async_op,
        )
        return parts, call

    def compose(self, op: str, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS) -> Composed:
        """A collective `op` on `tensor` that the caller makes of messages, and ends."""
        return Composed(self, op, tensor, name, purpose)

    @contextlib.contextmanager
    def composed(self, op: str, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS) -> Iterator[Composed]:
        """As `compose`, ended with the context."""
        call = self.compose(op, tensor, name, purpose=purpose)
        yield call
        call.end()

    def record(
        self, op: str, tensor: str, shape: Sequence[int], dtype: torch.dtype, *, purpose: str = GRADIENTS
    ) -> None:
        """Enter an all_reduce, or a broadcast from rank 0, that a library made by itself (torch's DDP).

        It does not tell its seconds.
        """
        if self.world_size == 1:
            return
        payload = torch.Size(shape).numel() * dtype.itemsize
        if op == "broadcast":
            moved = broadcast_bytes(payload, self.world_size, self.rank)
        else:
            moved = (all_reduce_bytes(payload, self.world_size),) * 2
        self.ledger.enter(
            Row(self.ledger.iteration, purpose, op, tensor, tuple(shape), dtype_name(dtype), payload, *moved, None)
        )

    def _start(self, collective, entry: tuple, async_op: bool) -> Call:
        if self.world_size == 1:
            return Call.done()
        started = self.time.now()
        call = Call(self.ledger, collective(), self.row(*entry), self.time, started)
        if not async_op:
            call.wait()
        return call

    def row(self, op: str, tensor: torch.Tensor, name: str, purpose: str, sent: int, received: int) -> dict[str, Any]:
        """A row of the ledger for a call of this iteration, without its times."""
        return {
            "iteration": self.ledger.iteration,
            "purpose": purpose,
            "op": op,
            "tensor": name,
            "shape": tuple(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "payload_bytes": size_in_bytes(tensor),
            "bytes_sent": sent,
            "bytes_received": received,
        }

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy in the host's memory: gloo has no gather, scatter or messages for CUDA tensors."""
        return tensor.cpu() if self.backend == "gloo" else tensor


def open_group(meeting: Meeting | None, backend: str) -> None:
    """Make torch's default process group of the ranks that met; its collectives time out after the meeting's seconds.

    A single rank needs no meeting: its group has only itself.
    """
    if meeting is None:
        choose_interface("127.0.0.1")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", meeting.store),
        rank=meeting.identity.rank,
        world_size=meeting.identity.world_size,
        timeout=timedelta(seconds=meeting.seconds),
    )


def close_group() -> None:
    """Leave the process group. A process that ends without doing so may be aborted by gloo's threads."""
    if dist.is_initialized():
        dist.destroy_process_group()
