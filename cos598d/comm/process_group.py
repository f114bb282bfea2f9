"""torch's default process group for the ranks that met: opening and closing it."""

import os
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  # before a group opens: its functions keep one that is open as their default

from cos598d.world.meeting import Meeting
from cos598d.world.network import choose_interface

# How gloo's ranks find each other's addresses in the store. With these settings each asks once for up to 128 ranks, and
# gets one address of each. By default each asks twice for every other rank, and gets a number for every pair that it is
# in. Among n ranks these are 2 n^2 questions and n^3 numbers, all of them through rank 0. All ranks must have the same
# settings.
GLOO_RENDEZVOUS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}


def open_group(meeting: Meeting | None, backend: str) -> None:
    """Open torch's default process group for the ranks that met. Collectives time out after the meeting's seconds.

    A single rank needs no meeting: its group has only itself.
    """
    if meeting is None:
        choose_interface("127.0.0.1")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    for name, value in GLOO_RENDEZVOUS.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", meeting.store),
        rank=meeting.identity.rank,
        world_size=meeting.identity.world_size,
        timeout=timedelta(seconds=meeting.seconds),
    )


def close_group() -> None:
    """Leave the process group, and end its threads. A process that exits while they run may be aborted (SIGABRT)."""
    if dist.is_initialized():
        dist.destroy_process_group()
