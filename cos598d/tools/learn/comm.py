"""The communicator of a student's code: the library's own, with messages, and with a record of all calls."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from cos598d.comm.calls import Pending
from cos598d.comm.communicator import Communicator
from cos598d.tools.check.notes import LONGEST_NAME, MEET, MET, THREADS
from cos598d.tools.check.noting import NotedCall, NotedStep, NotingCommunicator
from cos598d.tools.learn.events import CALL, COMPUTE, MOST_EVENTS, RECEIVE, SEND, WAIT, Event


class LessonCommunicator(NotingCommunicator):
    """A communicator that notes its calls, with the student's line, before and after each.

        comm.rank, comm.world_size
        comm.all_reduce(tensor, name)            tensor becomes the sum over all ranks, on every rank
        comm.broadcast(tensor, name, root=0)     tensor becomes the root's
        comm.reduce(tensor, name, root=0)        the root's tensor becomes the sum
        comm.gather(tensor, name, root=0)        the list of all ranks' tensors at the root, None elsewhere
        comm.scatter(tensor, parts, name, root=0)   tensor becomes parts[rank] of the root; parts is None elsewhere
        parts, call = comm.all_gather(tensor, name)   the list of all ranks' tensors, on every rank
        comm.send(tensor, to), comm.recv(tensor, source)      a message; over when the call returns
        comm.isend(tensor, to), comm.irecv(tensor, source)    the same, begun; .wait() of what they return ends it

    `all_reduce(..., async_op=True)` begins the call and returns an object with `wait()`. So does `all_gather`, whose
    parts may be read after `wait()`. Without async_op a call is over when it returns. `name` is only for the record.
    """

    def __init__(self, comm: Communicator, file: str):
        """Lines are those of `file`, the student's."""
        super().__init__(comm, file)
        self.events: list[Event] = []
        self._since = 0.0
        self.probe: Any = None  # has `Probe`'s look and ended
        self._threads = 1 + (self.world_size > 1)  # this one, and the watchdog's

    def begin_record(self) -> None:
        """Forget the events so far, and start the record now."""
        self.events, self._since = [], time.perf_counter()

    def computed(self, name: str, tensor: str = "") -> None:
        """Note that the time since the last call, or since the last `computed`, was spent on computing `name`."""
        now = time.perf_counter()
        self._keep_event(COMPUTE, name, self._since, now, 0, None, tensor)
        self._since = now

    def exchange(self, value: Any) -> list[Any]:
        self.notes.write(MEET)
        values = super().exchange(value)
        self.notes.write(MET)
        return values

    def scatter(
        self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, name: str = "", *, root: int = 0, **more: Any
    ) -> None:
        if (parts is None) == (self.rank == root) and self.world_size > 1:
            has = "gave no parts" if parts is None else "gave parts"
            raise ValueError(
                f"rank {self.rank} {has} to scatter: the root (rank {root}) gives them, all others give None"
            )
        super().scatter(tensor, parts, name, root=root, **more)

    def isend(self, tensor: torch.Tensor, to: int, name: str = "") -> Pending:
        """Begin to send `tensor` to the rank `to`; it must not change until `wait()` of the result returns."""
        return self._message("send", tensor, to, name)

    def irecv(self, tensor: torch.Tensor, source: int, name: str = "") -> Pending:
        """Begin to receive into `tensor` from the rank `source`; it is there when `wait()` of the result returns."""
        return self._message("receive", tensor, source, name)

    def send(self, tensor: torch.Tensor, to: int, name: str = "") -> None:
        """Send `tensor` to the rank `to`; returns when that rank has asked for it and it is being sent."""
        self._message("send", tensor, to, name).wait()

    def recv(self, tensor: torch.Tensor, source: int, name: str = "") -> None:
        """Receive into `tensor` from the rank `source`."""
        self._message("receive", tensor, source, name).wait()

    def _message(self, op: str, tensor: torch.Tensor, peer: int, name: str) -> NotedCall:
        if not 0 <= peer < self.world_size or peer == self.rank:
            other = f"{op}s to" if op == "send" else f"{op}s from"
            raise ValueError(f"rank {self.rank} {other} rank {peer}; the other ranks are {self.others}")
        probe = self.probe
        if probe:
            probe.look()
        step = self.begin(op, tensor, name, peer, blocks=False)
        composed = Communicator.compose(self, op, tensor, step.tensor)
        pairs = [(tensor, peer)]
        messages = composed.start(sends=pairs) if op == "send" else composed.start(receives=pairs)

        def wait() -> None:
            messages.wait()
            composed.end()
            if probe:
                probe.ended(op == "send", peer, tensor, step.start)

        return NotedCall(self, step, wait)

    def begin(self, op: str, tensor: torch.Tensor, name: str, peer: int | None, blocks: bool) -> NotedStep:
        if threading.active_count() > self._threads:
            self.notes.write(THREADS)
        step = super().begin(op, tensor, name, peer, blocks)
        self._keep_event(COMPUTE, "compute", self._since, step.start, 0, None)
        self._since = time.perf_counter()
        return step

    def ended(self, step: NotedStep, waiting_since: float) -> None:
        now = time.perf_counter()
        kind = {"send": SEND, "receive": RECEIVE}.get(step.op, CALL)
        self._keep_event(kind, step.name, step.start, now, step.bytes, step.peer, step.tensor)
        if waiting_since > step.start:
            self._keep_event(COMPUTE, "compute", self._since, waiting_since, 0, None)
            self._keep_event(WAIT, step.name, waiting_since, now, 0, step.peer, step.tensor)
        self._since = now
        super().ended(step, waiting_since)

    def _keep_event(
        self, kind: str, name: str, start: float, end: float, size: int, peer: int | None, *tensors: str
    ) -> None:
        if len(self.events) < MOST_EVENTS and (kind != COMPUTE or end > start > 0):
            names = tuple(tensor for tensor in tensors if tensor)
            self.events.append(Event(self.rank, kind, name[:LONGEST_NAME], start, end, size, peer, names))
