"""Real ranks for tests whose function takes the run's `Ranks`. Others take tests/ranks.py."""

import json
from typing import Any

import torch
import torch.distributed as dist
from ranks import GROUP_SECONDS, on_ranks

from cos598d.comm.group import Ranks


class Meeting:
    """What `Ranks` needs of the ranks that met, over the group that is open."""

    seconds = 60.0

    def exchange(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, json.loads(json.dumps(value)))
        return found

    def collect(self, value: Any) -> list[Any] | None:
        found = self.exchange(value)
        return found if dist.get_rank() == 0 else None


def these_ranks() -> Ranks:
    """The ranks of the group that is open."""
    world_size = dist.get_world_size()
    return Ranks(dist.get_rank(), world_size, torch.device("cpu"), "gloo", ["here"] * world_size, meeting=Meeting())


def run_ranks(world_size, function, *arguments, seconds=GROUP_SECONDS):
    """What `function(comm, *arguments)` returns on each of `world_size` ranks. AssertionError if a rank fails."""
    return on_ranks(world_size, _with_ranks, function, *arguments, seconds=seconds)


def _with_ranks(rank, world_size, function, *arguments):
    return function(these_ranks(), *arguments)
