"""Real ranks for tests whose function takes the run's `Ranks`. Others take tests/ranks.py."""

import torch
import torch.distributed as dist
from ranks import GROUP_SECONDS, on_ranks

from cos598d.comm.group import Ranks
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting


def run_ranks(world_size, function, *arguments, seconds=GROUP_SECONDS):
    """What `function(comm, *arguments)` returns on each of `world_size` ranks. AssertionError if a rank fails."""
    return on_ranks(world_size, _with_ranks, function, *arguments, seconds=seconds)


def _with_ranks(rank, world_size, function, *arguments):
    store, hosts = dist.distributed_c10d._get_default_store(), ["here"] * world_size
    meeting = Meeting(Identity(rank, world_size), store, hosts, seconds=60) if world_size > 1 else None
    return function(Ranks(rank, world_size, torch.device("cpu"), "gloo", hosts, meeting=meeting), *arguments)
