"""Calls under way, and how one is waited for."""

from typing import Any, Protocol

import torch
import torch.distributed as dist

from cos598d.comm.ledger import Ledger
from cos598d.comm.timers import Timer, Timestamp


class Pending(Protocol):
    """A call under way: `wait` blocks until its result is there."""

    def wait(self) -> None: ...


class Call:
    """A collective under way; `wait` blocks until the result is there, and enters the call in the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        work: "Pending | dist.Work | None",
        row: dict[str, Any] | None,
        time: Timer,
        started: Timestamp,
        landing: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        """`landing`: what is sent, and the tensor into which it is copied when it is there; None: the tensor itself."""
        self._ledger, self._work, self._row, self._time, self._started = ledger, work, row, time, started
        self._landing = landing

    @classmethod
    def done(cls) -> "Call":
        """A call that is over, and in the ledger."""
        return cls(Ledger(), None, None, Timer(), None)

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited for it yet."""
        return self._row is not None

    def wait(self) -> None:
        """Block until the result is in the tensor; on CUDA, whatever this stream does next, not the host.

        nccl's wait makes the stream wait. gloo works on the host: its wait blocks the host while the tensor is sent
        from and to host memory, and the stream until it is back on the device.
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
