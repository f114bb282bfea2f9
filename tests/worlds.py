"""Real ranks for tests whose function takes the run's `Ranks`: a failing rank fails the test.

A test whose function only calls torch.distributed takes tests/ranks.py.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from programs import PATIENCE

from cos598d.comm.group import Ranks
from cos598d.tools.exam.ranks import Wrong, run
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting


class RankFailure(AssertionError):
    """A rank failed."""


def run_ranks(world_size, function, *arguments, seconds=PATIENCE):
    """Call `function(comm, *arguments)` on `world_size` ranks at once; return their results (JSON), in order of rank.

    Raises RankFailure if a rank fails; one that hangs is ended after `seconds`.
    """
    words = (_with_ranks, function, *arguments)
    try:
        return run(world_size, *words, file=Path(__file__), loads=False, seconds=seconds).values
    except Wrong as wrong:
        raise RankFailure(wrong.words) from None


def _with_ranks(comm, module, function, *arguments):
    meeting = None
    if comm.world_size > 1:
        store = dist.distributed_c10d._get_default_store()
        identity = Identity(comm.rank, comm.world_size)
        meeting = Meeting(identity, store, ["here"] * comm.world_size, seconds=60)
    ranks = Ranks(comm.rank, comm.world_size, torch.device("cpu"), "gloo", ["here"] * comm.world_size, meeting=meeting)
    return function(ranks, *arguments)
