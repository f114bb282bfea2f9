"""On a rank under test: a communicator that notes each call, with the line that made it, before it is made."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cos598d.comm.calls import Call
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name, size_in_bytes
from cos598d.comm.messages import PointToPointCollective
from cos598d.tools.check.notes import BEGIN, CHANGED, COLLECTIVES, DROPPED, END, LONGEST_NAME, RAISED, WAITS, Notes
from cos598d.tools.check.spawn import CALLS

NO_OPTIONS: Mapping[str, Any] = {}


class NotingCommunicator(Communicator):
    """A communicator that also notes in a file which calls begin, are waited for and end.

    So the judge knows which calls matched, even if ranks wait for each other forever or the library ends them. A call
    without a name gets a number.
    """

    def __init__(self, comm: Communicator, file: str = ""):
        """Lines are those of `file`, the one under test."""
        vars(self).update(vars(comm))
        path = Path(tempfile.gettempdir()) / f"{CALLS}{comm.rank}"
        self.notes = Notes(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC))
        self._file, self._number, self._collectives = file, 0, 0
        self._started: list[tuple[str, Call]] = []

    def all_reduce(self, tensor: torch.Tensor, name: str = "", **options: Any) -> Any:
        with self._noted("all_reduce", tensor, name, None, options) as step:
            call = super().all_reduce(tensor, step.tensor, **options)
            return self._until_waited(call, step, tensor)

    def broadcast(self, tensor: torch.Tensor, name: str = "", *, root: int = 0, **options: Any) -> None:
        with self._noted("broadcast", tensor, name, root) as step:
            super().broadcast(tensor, step.tensor, root=root, **options)

    def gather(
        self, tensor: torch.Tensor, name: str = "", *, root: int = 0, **options: Any
    ) -> list[torch.Tensor] | None:
        with self._noted("gather", tensor, name, root) as step:
            return super().gather(tensor, step.tensor, root=root, **options)

    def scatter(
        self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, name: str = "", *, root: int = 0, **more: Any
    ) -> None:
        with self._noted("scatter", tensor, name, root) as step:
            super().scatter(tensor, parts, step.tensor, root=root, **more)

    def reduce(self, tensor: torch.Tensor, name: str = "", *, root: int = 0, **options: Any) -> None:
        with self._noted("reduce", tensor, name, root) as step:
            super().reduce(tensor, step.tensor, root=root, **options)

    def all_gather(self, tensor: torch.Tensor, name: str = "", **options: Any) -> Any:
        with self._noted("all_gather", tensor, name, None, options) as step:
            parts, call = super().all_gather(tensor, step.tensor, **options)
            return parts, self._until_waited(call, step, tensor)

    def compose(self, op: str, tensor: torch.Tensor, name: str, **options: Any) -> PointToPointCollective:
        step = self.begin(op, tensor, name, None, blocks=False)
        self.notes.write(END, step.number)  # its parts end by themselves
        return super().compose(op, tensor, name, **options)

    def not_waited_for(self) -> list[str]:
        """The calls since the last time this was called that are still not waited for."""
        started, self._started = self._started, []
        return [what for what, call in started if call.is_under_way]

    def begin(self, op: str, tensor: torch.Tensor, name: str, peer: int | None, blocks: bool) -> "NotedStep":
        """Note that a call begins. Raises TypeError unless it is given a tensor."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"comm.{op} was given {tensor!r:.40}, expected a tensor. Does that parameter have a gradient yet?"
            )
        self._number += 1
        self._collectives += op in COLLECTIVES  # counted equally on all ranks, whatever messages they exchange
        tensor_name = str(name)[:LONGEST_NAME] or f"tensor {self._collectives}"
        step = NotedStep(self._number, op, tensor_name, size_in_bytes(tensor), peer, self._line())
        about = (op, step.tensor, tensor.shape, dtype_name(tensor.dtype), peer, step.line, blocks)
        self.notes.write(BEGIN, step.number, *about)
        return step

    def ended(self, step: "NotedStep", waiting_since: float) -> None:
        """Note that the call is over. This rank was blocked in it since `waiting_since`."""
        self.notes.write(END, step.number)

    def dropped(self, step: "NotedStep") -> None:
        """Note that the call's result is gone and nothing waited for it: gloo may cancel the message."""
        self.notes.write(DROPPED, step.number)

    def wait(self, step: "NotedStep", wait: Callable[[], None]) -> None:
        """Wait for a call that was started, in the current line."""
        self.notes.write(WAITS, step.number, self._line())
        since = time.perf_counter()
        with self._noting_errors(step):
            wait()
        self.ended(step, since)

    @contextmanager
    def _noted(
        self, op: str, tensor: torch.Tensor, name: str, peer: int | None, options: Mapping[str, Any] = NO_OPTIONS
    ) -> Iterator["NotedStep"]:
        """A call that ends with the context, unless something will wait for it."""
        step = self.begin(op, tensor, name, peer, blocks=not options.get("async_op"))
        with self._noting_errors(step):
            yield step
        if not step.is_kept:
            self.ended(step, step.start)

    @contextmanager
    def _noting_errors(self, step: "NotedStep") -> Iterator[None]:
        """If the call ends in an exception, this rank is not blocked in it any more."""
        try:
            yield
        except BaseException:
            self.notes.write(RAISED, step.number)
            raise

    def _until_waited(self, call: Call, step: "NotedStep", tensor: torch.Tensor) -> Any:
        """The call; while it runs, in a form whose end is noted when it has been waited for."""
        if not call.is_under_way:
            return call
        self._started.append((step.name + (f" in line {step.line}" if step.line else ""), call))
        version = _version_of(tensor)

        def wait() -> None:
            if _version_of(tensor) != version:
                self.notes.write(CHANGED, step.number, self._line())
            call.wait()

        return NotedCall(self, step, wait)

    def _line(self) -> int:
        """The current line of the file under test; 0 if there is none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return frame.f_lineno if frame else 0


def _version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; -1 if that is unknown. A view counts for its base."""
    return -1 if tensor._is_view() or tensor.is_inference() else tensor._version


class NotedStep:
    """A call that was started. `is_kept`: something will wait for it."""

    def __init__(self, number: int, op: str, tensor: str, size: int, peer: int | None, line: int):
        self.number, self.op, self.tensor, self.bytes, self.peer, self.line = number, op, tensor, size, peer, line
        to = {"send": f" to rank {peer}", "receive": f" from rank {peer}"}.get(op, "")
        self.name = f"{op} of {tensor}{to}"[:LONGEST_NAME]
        self.start, self.is_kept = time.perf_counter(), False


class NotedCall:
    """A running call or message whose end is noted when it has been waited for."""

    def __init__(self, comm: NotingCommunicator, step: NotedStep, wait: Callable[[], None]):
        self._comm, self._step = comm, step
        self._wait: Callable[[], None] | None = wait
        step.is_kept = True

    @property
    def is_under_way(self) -> bool:
        """Whether nothing has waited for it yet."""
        return self._wait is not None

    def wait(self) -> None:
        """Block until it is over. May be called more than once."""
        if self._wait is not None:
            wait, self._wait = self._wait, None  # which frees the tensor
            self._comm.wait(self._step, wait)

    def __del__(self) -> None:
        if self._wait is not None:
            self._comm.dropped(self._step)
