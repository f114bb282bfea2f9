"""One rank's place in a process group: who it is, where the others are, and what each of its calls is entered in."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cos598d.comm.calls import Pending
from cos598d.comm.ledger import Ledger, dtype_name, size_in_bytes
from cos598d.comm.timers import timer_of
from cos598d.world.deadlock import DeadlockDetector

if TYPE_CHECKING:
    from cos598d.world.meeting import Meeting


class Endpoint:
    """One rank of a process group.

    `device` is where this rank's tensors live, `time` gives the moments of its work, `backend` is "gloo" or "nccl".
    """

    def __init__(self, meeting: "Meeting | None", backend: str, device: torch.device, ledger: Ledger | None = None):
        self.rank = meeting.identity.rank if meeting else 0
        self.world_size = meeting.identity.world_size if meeting else 1
        self.backend, self.device = backend, device
        self.time = timer_of(device)
        self.ledger = ledger or Ledger()
        self.deadlocks = meeting.deadlocks if meeting else DeadlockDetector()
        self._meeting = meeting
        self._next_tag = 1  # 0 is for messages in one order
        self.group: dist.ProcessGroup | None = None  # torch's default one

    def take_tags(self, count: int) -> int:
        """The first of so many tags in a row that nobody else takes; every rank asks for the same, in one order.

        So one model's messages are never taken for another model's.
        """
        first, self._next_tag = self._next_tag, self._next_tag + count
        return first

    @property
    def others(self) -> list[int]:
        """All other ranks, the next one first: if every rank begins there, not all of them send to rank 0 first."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def timeout_seconds(self) -> float:
        """After how many seconds a collective that does not end is an error; without end for a single rank."""
        return self._meeting.seconds if self._meeting else float("inf")

    @property
    def store(self) -> dist.Store:
        """The key-value store of the ranks' meeting; one of its own for a single rank."""
        return self._meeting.store if self._meeting else dist.HashStore()

    @property
    def bytes_are_assumed(self) -> bool:
        """Whether the formulas are another backend's: the bytes of single collectives have then never been counted."""
        return self.backend != "gloo"

    @property
    def messages_have_tags(self) -> bool:
        """Whether messages are told apart by their tags, and not only by their order."""
        return self.backend == "gloo"

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), in order of rank. For small facts: through the store, not measured."""
        return self._meeting.exchange(value) if self._meeting else [value]

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's `value` (JSON) on rank 0, in order of rank; None on the others, which do not wait for it."""
        return self._meeting.collect(value) if self._meeting else [value]

    def peer(self, rank: int) -> int:
        """What torch calls a rank of this group among all processes."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def guard(self, start: Callable[[], Any], name: str) -> Pending:
        """Start a message or a collective on the tensor of this name. Its errors are torch's."""
        return start()

    def row(self, op: str, tensor: torch.Tensor, name: str, purpose: str, sent: int, received: int) -> dict[str, Any]:
        """A row of the ledger for a call, without its iteration and its times."""
        return {
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


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy of it; a sparse one is sent as it is."""
    return tensor.resolve_conj().resolve_neg().contiguous() if tensor.layout == torch.strided else tensor


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory, (bytes,) uint8."""
    return dense.view(-1).view(torch.uint8)


def from_bytes(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What `as_bytes` made of a tensor of this one's dtype and shape."""
    return part.view(tensor.dtype).view(tensor.shape)
