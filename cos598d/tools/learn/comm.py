"""The communicator that a student's code is given: the library's own, with messages, and with a record of it all."""

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cos598d.comm.calls import Call, Pending
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name, size_in_bytes
from cos598d.tools.check.trace import TracedCommunicator
from cos598d.tools.learn.events import CALL, COMPUTE, LONGEST_NAME, MOST_EVENTS, RECEIVE, SEND, WAIT, Event
from cos598d.tools.learn.notes import BEGIN, CHANGED, COLLECTIVES, END, MEET, MET, RAISED, THREADS, WAITS, Notes

NO_OPTIONS: Mapping[str, Any] = {}


class LessonCommunicator(TracedCommunicator):
    """A communicator whose calls are noted, with the student's line, before they are made and when they are over.

        comm.rank, comm.world_size
        comm.all_reduce(tensor, name)            tensor becomes the sum over all ranks, on every rank
        comm.broadcast(tensor, name, root=0)     tensor becomes the root's
        comm.reduce(tensor, name, root=0)        the root's tensor becomes the sum
        comm.gather(tensor, name, root=0)        the list of all ranks' tensors at the root, None elsewhere
        comm.scatter(tensor, parts, name, root=0)   tensor becomes parts[rank] of the root; parts is None elsewhere
        parts, call = comm.all_gather(tensor, name)   the list of all ranks' tensors, on every rank
        comm.send(tensor, to), comm.recv(tensor, source)      a message; over when the call returns
        comm.isend(tensor, to), comm.irecv(tensor, source)    the same, begun; .wait() of what they return ends it

    `all_reduce(..., async_op=True)` begins, and returns what to `wait()` for; so does `all_gather`, whose parts may be
    read after it. Without async_op a call is over when it returns. `name` is for the record alone.
    """

    def __init__(self, comm: Communicator, path: Path, file: str):
        """Note into the file `path`; lines are those of `file`, the student's."""
        super().__init__(comm, path)
        self.notes = Notes(self._notes)
        self.events: list[Event] = []
        self._file, self._number, self._collectives, self._since = file, 0, 0, 0.0
        self.probe: Any = None  # has `Probe`'s look and ended
        self._threads = 1 + (self.world_size > 1)  # this one, and the watchdog's

    def begin_record(self) -> None:
        """Forget the events so far; what comes now is computed from now on."""
        self.events, self._since = [], time.perf_counter()

    def computed(self, name: str, tensor: str = "") -> None:
        """What was done since the last call, or since this was last said, was computing `name`."""
        now = time.perf_counter()
        self._keep_event(COMPUTE, name, self._since, now, 0, None, tensor)
        self._since = now

    def exchange(self, value: Any) -> list[Any]:
        self.notes.write(MEET)
        values = super().exchange(value)
        self.notes.write(MET)
        return values

    def all_reduce(self, tensor: torch.Tensor, name: str = "", **options: Any) -> Any:
        with self._begun("all_reduce", tensor, name, None, options) as step:
            call = Communicator.all_reduce(self, tensor, step.tensor, **options)
            if call.is_under_way:
                return self._keep_until_waited(call, step, tensor)
        return call

    def broadcast(self, tensor: torch.Tensor, name: str = "", *, root: int = 0, **options: Any) -> None:
        with self._begun("broadcast", tensor, name, root) as step:
            Communicator.broadcast(self, tensor, step.tensor, root=root, **options)

    def gather(
        self, tensor: torch.Tensor, name: str = "", *, root: int = 0, **options: Any
    ) -> list[torch.Tensor] | None:
        with self._begun("gather", tensor, name, root) as step:
            return Communicator.gather(self, tensor, step.tensor, root=root, **options)

    def scatter(
        self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, name: str = "", *, root: int = 0, **more: Any
    ) -> None:
        self._check_parts(parts, root)
        with self._begun("scatter", tensor, name, root) as step:
            Communicator.scatter(self, tensor, parts, step.tensor, root=root, **more)

    def reduce(self, tensor: torch.Tensor, name: str = "", *, root: int = 0, **options: Any) -> None:
        with self._begun("reduce", tensor, name, root) as step:
            Communicator.reduce(self, tensor, step.tensor, root=root, **options)

    def all_gather(self, tensor: torch.Tensor, name: str = "", **options: Any) -> Any:
        with self._begun("all_gather", tensor, name, None, options) as step:
            parts, call = Communicator.all_gather(self, tensor, step.tensor, **options)
            if call.is_under_way:
                return parts, self._keep_until_waited(call, step, tensor)
        return parts, call

    def isend(self, tensor: torch.Tensor, to: int, name: str = "") -> Pending:
        """Begin to send `tensor` to the rank `to`; it must stay as it is until `wait()` of the result returns."""
        return self._message("send", tensor, to, name)

    def irecv(self, tensor: torch.Tensor, source: int, name: str = "") -> Pending:
        """Begin to receive into `tensor` from the rank `source`; it is there when `wait()` of the result returns."""
        return self._message("receive", tensor, source, name)

    def send(self, tensor: torch.Tensor, to: int, name: str = "") -> None:
        """Send `tensor` to the rank `to`; returns when that rank has asked for it and it is on its way."""
        self._message("send", tensor, to, name).wait()

    def recv(self, tensor: torch.Tensor, source: int, name: str = "") -> None:
        """Receive into `tensor` from the rank `source`."""
        self._message("receive", tensor, source, name).wait()

    def _message(self, op: str, tensor: torch.Tensor, peer: int, name: str) -> "_Recorded":
        if not 0 <= peer < self.world_size or peer == self.rank:
            other = f"{op}s to" if op == "send" else f"{op}s from"
            raise ValueError(f"rank {self.rank} {other} rank {peer}; the other ranks are {self.others}")
        probe = self.probe
        if probe:
            probe.look()
        step = self._begin(op, tensor, name, peer, blocks=False)
        composed = Communicator.compose(self, op, tensor, step.tensor)
        pairs = [(tensor, peer)]
        messages = composed.start(sends=pairs) if op == "send" else composed.start(receives=pairs)

        def wait() -> None:
            messages.wait()
            composed.end()
            if probe:
                probe.ended(op == "send", peer, tensor, step.start)

        return _Recorded(self, step, wait)

    def _check_parts(self, parts: Sequence[torch.Tensor] | None, root: int) -> None:
        if (parts is None) == (self.rank == root) and self.world_size > 1:
            has = "gave no parts" if parts is None else "gave parts"
            raise ValueError(f"rank {self.rank} {has} to scatter: the root (rank {root}) gives them, the others None")

    def _keep_until_waited(self, call: Call, step: "_Step", tensor: torch.Tensor) -> "_Recorded":
        self._started.append((f"{step.name} in line {step.line}", call))
        version = _version_of(tensor)

        def wait() -> None:
            if _version_of(tensor) != version:
                self.notes.write(CHANGED, step.number, self._line())
            call.wait()

        return _Recorded(self, step, wait)

    @contextmanager
    def _begun(
        self, op: str, tensor: torch.Tensor, name: str, peer: int | None, options: Mapping[str, Any] = NO_OPTIONS
    ) -> Iterator["_Step"]:
        """A call that is over with the context, unless somebody is to wait for it."""
        step = self._begin(op, tensor, name, peer, blocks=not options.get("async_op"))
        with self.noting_errors(step):
            yield step
        if not step.is_kept:
            self.ended(step, step.start)

    def _begin(self, op: str, tensor: torch.Tensor, name: str, peer: int | None, blocks: bool) -> "_Step":
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"comm.{op} was given {tensor!r:.40}, expected a tensor; has that parameter a gradient yet?"
            )
        self._number += 1
        self._collectives += op in COLLECTIVES  # counted alike on all ranks, whatever messages they exchange
        tensor_name = str(name)[:LONGEST_NAME] or f"tensor {self._collectives}"
        step = _Step(op, tensor_name, size_in_bytes(tensor), peer, self._line())
        self._keep_event(COMPUTE, "compute", self._since, step.start, 0, None)
        if threading.active_count() > self._threads:
            self.notes.write(THREADS)
        about = (op, step.tensor, tensor.shape, dtype_name(tensor.dtype), peer, step.line, blocks)
        self.notes.write(BEGIN, self._number, *about)
        step.number = self._number
        self._since = time.perf_counter()
        return step

    def ended(self, step: "_Step", waiting_since: float) -> None:
        """The call is over; this rank stood still for it since that moment."""
        now = time.perf_counter()
        kind = {"send": SEND, "receive": RECEIVE}.get(step.op, CALL)
        self._keep_event(kind, step.name, step.start, now, step.bytes, step.peer, step.tensor)
        if waiting_since > step.start:
            self._keep_event(COMPUTE, "compute", self._since, waiting_since, 0, None)
            self._keep_event(WAIT, step.name, waiting_since, now, 0, step.peer, step.tensor)
        self._since = now
        self.notes.write(END, step.number)

    @contextmanager
    def noting_errors(self, step: "_Step") -> Iterator[None]:
        """Where the call ends in an exception, this rank does not stand still in it any more."""
        try:
            yield
        except BaseException:
            self.notes.write(RAISED, step.number)
            raise

    def waiting(self, step: "_Step") -> float:
        """This rank begins to wait for the call, in the student's line that is now under way."""
        self.notes.write(WAITS, step.number, self._line())
        return time.perf_counter()

    def _keep_event(
        self, kind: str, name: str, start: float, end: float, size: int, peer: int | None, *tensors: str
    ) -> None:
        if len(self.events) < MOST_EVENTS and (kind != COMPUTE or end > start > 0):
            names = tuple(tensor for tensor in tensors if tensor)
            self.events.append(Event(self.rank, kind, name[:LONGEST_NAME], start, end, size, peer, names))

    def _line(self) -> int:
        """The student's line that is under way; 0 where none is."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return frame.f_lineno if frame else 0


def _version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; -1 where that cannot be told, as of a view: it counts for its base."""
    return -1 if tensor._is_view() or tensor.is_inference() else tensor._version


class _Step:
    """A call that was begun."""

    def __init__(self, op: str, tensor: str, size: int, peer: int | None, line: int):
        self.op, self.tensor, self.bytes, self.peer, self.line = op, tensor, size, peer, line
        to = {"send": f" to rank {peer}", "receive": f" from rank {peer}"}.get(op, "")
        self.name = f"{op} of {tensor}{to}"[:LONGEST_NAME]
        self.number, self.start, self.is_kept = 0, time.perf_counter(), False


class _Recorded:
    """A call or a message under way whose end is recorded when somebody has waited for it."""

    def __init__(self, comm: LessonCommunicator, step: _Step, wait: Any):
        self._comm, self._step, self._wait = comm, step, wait
        step.is_kept = True

    def wait(self) -> None:
        """Block until it is over. May be called more than once."""
        if self._wait is None:
            return
        wait, self._wait = self._wait, None
        since = self._comm.waiting(self._step)
        with self._comm.noting_errors(self._step):
            wait()
        self._comm.ended(self._step, since)
