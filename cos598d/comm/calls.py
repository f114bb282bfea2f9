"""Calls that have been started, and how to wait for them."""

from typing import Any, Protocol

import torch
import torch.distributed as dist

from cos598d.comm.ledger import Ledger
from cos598d.comm.timers import Timer, Timestamp


class Pending(Protocol):
    """A call that has been started. `wait` blocks until its result is ready."""

    def wait(self) -> None: ...


class Call:
    """A collective that has been started. `wait` blocks until its result is ready, and enters it in the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        work: "Pending | dist.Work | None",
        row: dict[str, Any] | None,
        time: Timer,
        started: Timestamp,
        landing: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        """`landing`: the tensor being sent, and the tensor into which its result is copied; None: the tensor itself."""
        self._ledger, self._work, self._row, self._time, self._started = ledger, work, row, time, started
        self._landing = landing

    @classmethod
    def done(cls) -> "Call":
        """A call that has ended and is in the ledger."""
        return cls(Ledger(), None, None, Timer(), None)

    @property
    def is_under_way(self) -> bool:
        """Whether nothing has waited for it yet."""
        return self._row is not None

    def wait(self) -> None:
        """Block until the result is in the tensor. On CUDA only this stream's later work waits, not the host.

        nccl's wait makes the stream wait. gloo works on the host. Its wait blocks the host while the tensor is sent to
        and from host memory, and blocks the stream until the result is on the device.
        """
        if self._row is None:
            return
        if self._work is not None:
            self._work.wait()
        if self._landing is not None:
            travelled, tensor = self._landing
            tensor.copy_(travelled)
            self._landing = None
        self._ledger.enter_call(self._row, self._time, self._started, self._time.now())
        self._row = None
