"""One rank's endpoint in a process group: who it is, where the others are, and the ledger of its calls."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cos598d.comm.calls import Pending
from cos598d.comm.ledger import Ledger, dtype_name, size_in_bytes
from cos598d.comm.timers import timer_of

if TYPE_CHECKING:
    from cos598d.world.meeting import Meeting


class Endpoint:
    """One rank of a process group.

    `device` holds this rank's tensors, `time` takes timestamps of its work, `backend` is "gloo" or "nccl".
    """

    def __init__(self, meeting: "Meeting | None", backend: str, device: torch.device, ledger: Ledger | None = None):
        self.rank = meeting.identity.rank if meeting else 0
        self.world_size = meeting.identity.world_size if meeting else 1
        self.backend, self.device = backend, device
        self.time = timer_of(device)
        self.ledger = ledger or Ledger()
        self._meeting = meeting
        self._next_tag = 1  # 0 is for messages that keep one order
        self.group: dist.ProcessGroup | None = None  # None: torch's default group

    def take_tags(self, count: int) -> int:
        """The first of `count` successive unused tags. Every rank must ask for the same counts in the same order.

        So one model's messages are never taken for another model's.
        """
        first, self._next_tag = self._next_tag, self._next_tag + count
        return first

    @property
    def others(self) -> list[int]:
        """All other ranks, the next one first. If every rank sends in this order, they do not all start with rank 0."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def timeout_seconds(self) -> float:
        """The seconds after which an unfinished collective is an error; infinite for a single rank."""
        return self._meeting.seconds if self._meeting else float("inf")

    @property
    def store(self) -> dist.Store:
        """The key-value store of the ranks' rendezvous; for a single rank, a store of its own."""
        return self._meeting.store if self._meeting else dist.HashStore()

    @property
    def bytes_are_assumed(self) -> bool:
        """Whether the formulas are another backend's, so that no call's bytes have ever been measured."""
        return self.backend != "gloo"

    @property
    def messages_have_tags(self) -> bool:
        """Whether messages are distinguished by their tags, and not only by their order."""
        return self.backend == "gloo"

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), in order of rank. For small values: they go through the store, uncounted."""
        return self._meeting.exchange(value) if self._meeting else [value]

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's `value` (JSON) on rank 0, in order of rank. Other ranks get None at once."""
        return self._meeting.collect(value) if self._meeting else [value]

    def waits_for(self, what: str) -> None:
        """Note what this rank waits for now ("": nothing), for the error if it never comes."""
        if self._meeting:
            self._meeting.waits_for = what

    def peer(self, rank: int) -> int:
        """The number of this group's rank among all processes, as torch needs it."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def guard(self, start: Callable[[], Any], name: str) -> Pending:
        """Start a message or a collective on the tensor of this name. Its errors are torch's."""
        return start()

    def row(self, op: str, tensor: torch.Tensor, name: str, purpose: str, sent: int, received: int) -> dict[str, Any]:
        """A row of the ledger for a call, without its iteration and times."""
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
    """The tensor itself, or a contiguous copy of it. A sparse tensor stays as it is."""
    return tensor.resolve_conj().resolve_neg().contiguous() if tensor.layout == torch.strided else tensor


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory, (bytes,) uint8."""
    return dense.view(-1).view(torch.uint8)


def from_bytes(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of `as_bytes`: a tensor with the dtype and shape of `tensor`."""
    return part.view(tensor.dtype).view(tensor.shape)
