"""Worlds of real ranks for tests of code that takes the old Communicator: a failing rank fails the test.

New tests take tests/ranks.py, whose functions call torch.distributed.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from cos598d.comm.communicator import Communicator
from programs import PATIENCE

from cos598d.tools.exam.ranks import Wrong, run
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting


class RankFailure(AssertionError):
    """A rank failed."""


def run_ranks(world_size, function, *arguments, seconds=PATIENCE):
    """Call `function(comm, *arguments)` on `world_size` ranks at once; return their results (JSON), in order of rank.

    Raises RankFailure if a rank fails; one that hangs is ended after `seconds`.
    """
    words = (_with_communicator, function, *arguments)
    try:
        return run(world_size, *words, file=Path(__file__), loads=False, seconds=seconds).values
    except Wrong as wrong:
        raise RankFailure(wrong.words) from None


def _with_communicator(comm, module, function, *arguments):
    meeting = None
    if comm.world_size > 1:
        store = dist.distributed_c10d._get_default_store()
        identity = Identity(comm.rank, comm.world_size)
        meeting = Meeting(identity, store, ["here"] * comm.world_size, seconds=60)
    return function(Communicator(meeting, "gloo", torch.device("cpu")), *arguments)


def run_each(world_size, function, cases, *arguments):
    """Call `function(comm, case, *arguments)` for one case after the other, in one world.

    Returns for each case the ranks' results. Raises as `run_ranks` does.
    """
    return list(zip(*run_ranks(world_size, _each, function, list(cases), arguments), strict=True))


def _each(comm, function, cases, arguments):
    return [function(comm, case, *arguments) for case in cases]
