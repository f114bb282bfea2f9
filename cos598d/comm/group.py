"""The ranks of a run: opening and closing torch's default process group, and what every rank knows of the others."""

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  # before a group opens: its functions keep one that is open as their default

from cos598d.comm.ledger import Ledger
from cos598d.world.network import choose_interface

if TYPE_CHECKING:
    from cos598d.world.meeting import Meeting

# How gloo's ranks find each other's addresses in the store. With these settings each asks once for up to 128 ranks, and
# gets one address of each. By default each asks twice for every other rank, and gets a number for every pair that it is
# in. Among n ranks these are 2 n^2 questions and n^3 numbers, all of them through rank 0. All ranks must have the same
# settings.
GLOO_RENDEZVOUS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
CPU = torch.device("cpu")


@dataclass
class Ranks:
    """The ranks of a run, as one of them sees them.

    hosts: for each rank, a value that is equal for the ranks of one host. device: where this rank's tensors are.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    hosts: list[Any]
    ledger: Ledger = field(default_factory=Ledger)
    meeting: "Meeting | None" = None

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), in order of rank. For small values: they go through the store, uncounted."""
        return self.meeting.exchange(value) if self.meeting else [value]

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's `value` (JSON) on rank 0, in order of rank. Other ranks get None at once."""
        return self.meeting.collect(value) if self.meeting else [value]


def open_group(meeting: "Meeting | None", backend: str = "gloo", device: torch.device = CPU) -> Ranks:
    """Open torch's default process group for the ranks that met. Collectives time out after the meeting's seconds.

    A single rank needs no meeting: its group has only itself, and is real, so that no code is special for one rank.
    """
    if meeting is None:
        choose_interface("127.0.0.1")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return Ranks(0, 1, device, backend, [0])
    for name, value in GLOO_RENDEZVOUS.items():
        os.environ.setdefault(name, value)
    rank, world_size = meeting.identity.rank, meeting.identity.world_size
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", meeting.store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=meeting.seconds),
    )
    return Ranks(rank, world_size, device, backend, list(meeting.hosts), meeting=meeting)


def close_group() -> None:
    """Leave the process group, and end its threads. A process that exits while they run may be aborted (SIGABRT)."""
    if dist.is_initialized():
        dist.destroy_process_group()
