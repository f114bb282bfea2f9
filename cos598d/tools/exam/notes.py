"""A student's communicator, which tells each call and its line before it makes it; and the record of a rank's calls."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cos598d.comm.gloo import bytes_moved

COLLECTIVES = (
    *("all_reduce", "broadcast", "gather", "scatter", "reduce", "all_gather"),
    *("reduce_scatter", "all_to_all"),
)
LONGEST_NAME = 200
Tell = Callable[..., None]


class NotAsAgreed(Exception):
    """On a rank: the file returned something that cannot be judged. The message is the whole sentence."""


@dataclass
class Noted:
    """A call that a rank began.

    peer: the root, or the other end of a message. waits: the line in which the rank waits for it, 0 if it does not.
    changed: whether its tensor was changed before. start and end are seconds on the clock that a host's ranks share.
    through: what the file calls, comm or dist.
    """

    op: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    peer: int | None
    line: int
    waits: int = 0
    is_over: bool = False
    changed: bool = False
    raised: bool = False
    start: float = 0.0
    end: float = 0.0
    through: str = "comm"

    @property
    def alike(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        return self.op, self.shape, self.dtype, self.peer, self.tensor

    @property
    def bytes(self) -> int:
        """The tensor's size."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def words(self, file: str) -> str:
        """The call in a sentence, with its line in `file`."""
        to = {"send": f" to rank {self.peer}", "recv": f" from rank {self.peer}"}.get(self.op, "")
        where = f", {file} line {self.line}" if self.line else ""  # else a module of ours made it
        if self.line and self.waits not in (0, self.line):
            where += f", waited for in line {self.waits}"
        shape = "x".join(map(str, self.shape)) or "1"
        return f"{self.through}.{self.op} of {self.tensor}{to} ({shape} {self.dtype}{where})"


@dataclass
class Trace:
    """All calls of one rank, in order."""

    calls: list[Noted] = field(default_factory=list)
    through: str = "comm"

    def note(self, kind: str, rest: Sequence[Any]) -> None:
        """Take a message of the rank, "through", "begin", "waits", "end" or "failed", with what `LessonComm` tells."""
        if kind == "begin":
            op, tensor, shape, dtype, peer, line, waits, now = rest
            about = (str(op), str(tensor), tuple(map(int, shape)), str(dtype), peer, int(line), int(waits))
            getattr(torch, str(dtype)).itemsize  # noqa: B018 - raises for what is no dtype
            self.calls.append(Noted(*about, start=float(now), end=float(now), through=self.through))
            return
        if kind == "through":
            self.through = str(rest[0])
            return
        call = self.calls[int(rest[0])]
        if kind == "waits":
            call.waits, call.changed = int(rest[1]) or call.line or 1, bool(rest[2])
        if kind == "end":
            call.is_over, call.end = True, float(rest[1])
        call.raised |= kind == "failed"

    @property
    def stuck_in(self) -> Noted | None:
        """The call that the rank waits for now; None if it waits for none."""
        waiting = [call for call in self.calls if call.waits and not (call.is_over or call.raised)]
        return waiting[-1] if waiting else None


@dataclass(frozen=True)
class Sent:
    """What a call moved on this rank, by the formulas of gloo's algorithms (bytes)."""

    op: str
    bytes_sent: int
    bytes_received: int


class NotedCall:
    """A call under way. `wait` ends it."""

    def __init__(self, comm: "LessonComm", number: int, wait: Callable[[], Any], tensor: torch.Tensor | None):
        self._comm, self._number, self._tensor = comm, number, tensor
        self._wait: Callable[[], Any] | None = wait
        self._version = _version(tensor)

    def wait(self) -> None:
        """Block until it is over. May be called more than once."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            self._comm.tell("waits", self._number, self._comm.line(), _version(self._tensor) != self._version)
            self._comm.watched(self._number, wait)


def _version(tensor: torch.Tensor | None) -> int:
    """How often a tensor was changed in place; -1 if that is unknown."""
    return -1 if tensor is None or tensor._is_view() or tensor.is_inference() else tensor._version


class LessonComm:
    """The communicator of a lesson: a few calls of torch.distributed, under its names.

        comm.rank, comm.world_size
        comm.all_reduce(tensor, name)            tensor becomes the sum over all ranks, on every rank
        comm.broadcast(tensor, name, root=0)     tensor becomes the root's
        comm.reduce(tensor, name, root=0)        the root's tensor becomes the sum
        comm.gather(tensor, name, root=0)        the list of all ranks' tensors at the root, None elsewhere
        comm.scatter(tensor, parts, name, root=0)   tensor becomes parts[rank] of the root; parts is None elsewhere
        parts, call = comm.all_gather(tensor, name)   the list of all ranks' tensors, on every rank
        comm.send(tensor, to), comm.recv(tensor, source)      a message; over when the call returns
        comm.isend(tensor, to), comm.irecv(tensor, source)    the same, begun; .wait() of what they return ends it

    `all_reduce(..., async_op=True)` begins the call and returns an object with `wait()`; so does `all_gather`, whose
    parts may be read after it. Without async_op a call is over when it returns. `name` is only for the record.
    """

    def __init__(self, file: Path, tell: Tell):
        """`file` is the student's, whose lines are noted; `tell` sends a note to the judge."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.file, self.tell = str(file), tell
        self.rows: list[Sent] = []
        self.probe: Callable[[str, str, torch.Tensor], None] | None = None  # sees messages begin and end
        self._named = 0

    def line(self) -> int:
        """The current line of the student's file; 0 if there is none."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame else 0

    def begin(self, op: str, tensor: torch.Tensor, name: str, peer: int | None, waits: bool) -> int:
        """Note that a call begins; return its number. Raises TypeError unless it is given a tensor."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"comm.{op} was given {tensor!r:.40}, expected a tensor. Does that parameter have a gradient yet?"
            )
        self._named += op in COLLECTIVES
        line = self.line()
        shown = str(name)[:LONGEST_NAME] or f"tensor {self._named}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        waits_in = (line or 1) if waits else 0
        self.tell("begin", op, shown, [*tensor.shape], dtype, peer, line, waits_in, time.perf_counter())
        root = peer if op in COLLECTIVES and peer is not None else 0
        self.rows.append(Sent(op, *bytes_moved(op, tensor.nbytes, self.world_size, self.rank, root)))
        return len(self.rows) - 1

    def watched(self, number: int, call: Callable[[], Any]) -> Any:
        """Make a call, and note its end, or that it failed."""
        try:
            result = call()
        except BaseException:
            self.tell("failed", number)
            raise
        self.tell("end", number, time.perf_counter())
        return result

    def all_reduce(
        self, tensor: torch.Tensor, name: str = "", *, async_op: bool = False, op: Any = None, purpose: str = ""
    ) -> Any:
        """Put the sum over all ranks into `tensor`."""
        number = self.begin("all_reduce", tensor, name, None, not async_op)
        kind = op or dist.ReduceOp.SUM
        return self._made(number, tensor, async_op, lambda dense: dist.all_reduce(dense, kind, async_op=True))

    def broadcast(self, tensor: torch.Tensor, name: str = "", *, root: int = 0, async_op: bool = False) -> Any:
        """Put the root's `tensor` into that of each rank."""
        number = self.begin("broadcast", tensor, name, root, not async_op)
        return self._made(number, tensor, async_op, lambda dense: dist.broadcast(dense, root, async_op=True))

    def reduce(self, tensor: torch.Tensor, name: str = "", *, root: int = 0) -> None:
        """Put the sum over all ranks into the root's `tensor`."""
        number = self.begin("reduce", tensor, name, root, True)
        total = tensor.contiguous().clone()  # gloo leaves partial sums on the other ranks
        self.watched(number, lambda: dist.reduce(total, root))
        if self.rank == root:
            tensor.copy_(total)

    def gather(self, tensor: torch.Tensor, name: str = "", *, root: int = 0) -> list[torch.Tensor] | None:
        """The tensors of all ranks at the root; None elsewhere."""
        number = self.begin("gather", tensor, name, root, True)
        dense = tensor.contiguous()
        parts = [torch.empty_like(dense) for _ in range(self.world_size)] if self.rank == root else None
        self.watched(number, lambda: dist.gather(dense, parts, root))
        return parts

    def scatter(
        self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, name: str = "", *, root: int = 0
    ) -> None:
        """Put `parts[r]` of the root into `tensor` of rank r. `parts` is None elsewhere."""
        if (parts is None) == (self.rank == root):
            has = "gave no parts" if parts is None else "gave parts"
            raise ValueError(
                f"rank {self.rank} {has} to scatter: the root (rank {root}) gives them, all others give None"
            )
        number = self.begin("scatter", tensor, name, root, True)
        dense = tensor.contiguous()
        given = None if parts is None else [part.contiguous() for part in parts]
        self.watched(number, lambda: dist.scatter(dense, given, root))
        if dense is not tensor:
            tensor.copy_(dense)

    def all_gather(self, tensor: torch.Tensor, name: str = "", *, async_op: bool = False) -> Any:
        """The tensors of all ranks, and the call, whose `wait` ends it with async_op."""
        number = self.begin("all_gather", tensor, name, None, not async_op)
        dense = tensor.contiguous()
        parts = [torch.empty_like(dense) for _ in range(self.world_size)]
        work = dist.all_gather(parts, dense, async_op=True)
        call = NotedCall(self, number, work.wait, tensor)
        if not async_op:
            self.watched(number, work.wait)
            call._wait = None
        return parts, call

    def isend(self, tensor: torch.Tensor, to: int, name: str = "") -> NotedCall:
        """Begin to send `tensor` to the rank `to`; it must not change until `wait()` of the result returns."""
        return self._message("send", tensor, to, name)

    def irecv(self, tensor: torch.Tensor, source: int, name: str = "") -> NotedCall:
        """Begin to receive into `tensor` from the rank `source`; it is there when `wait()` of the result returns."""
        return self._message("recv", tensor, source, name)

    def send(self, tensor: torch.Tensor, to: int, name: str = "") -> None:
        """Send `tensor` to the rank `to`; returns when that rank has asked for it."""
        self._message("send", tensor, to, name).wait()

    def recv(self, tensor: torch.Tensor, source: int, name: str = "") -> None:
        """Receive into `tensor` from the rank `source`."""
        self._message("recv", tensor, source, name).wait()

    def _made(self, number: int, tensor: torch.Tensor, is_later: bool, start: Callable[[torch.Tensor], Any]) -> Any:
        """Make a call in a dense copy of the tensor, if it is not dense; wait for it unless that is for later."""
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()

        def end(work: Any) -> None:
            work.wait()
            if dense is not tensor:
                tensor.copy_(dense)

        if is_later:
            work = start(dense)
            return NotedCall(self, number, lambda: end(work), tensor)
        return self.watched(number, lambda: end(start(dense)))

    def _message(self, op: str, tensor: torch.Tensor, peer: int, name: str) -> NotedCall:
        if not 0 <= peer < self.world_size or peer == self.rank:
            way = "sends to" if op == "send" else "receives from"
            raise ValueError(f"rank {self.rank} {way} rank {peer}; the other ranks are {self.others}")
        if self.probe:
            self.probe("begin", op, tensor)
        number = self.begin(op, tensor, name, peer, False)
        work = None
        if tensor.numel():  # gloo sends no empty message, and none is needed
            work = (dist.isend if op == "send" else dist.irecv)(tensor, peer)

        def end() -> None:
            if work is not None:
                work.wait()
            if self.probe:
                self.probe("end", op, tensor)

        return NotedCall(self, number, end, None)  # gloo receives into a tensor without a new version
