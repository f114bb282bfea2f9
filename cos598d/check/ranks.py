"""What a check does on each rank: a student's code runs there, and never in the check's own process."""

import inspect
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cos598d import conformance
from cos598d.comm import Communicator
from cos598d.measure.ledger import AGREEMENT, GRADIENTS, Ledger
from cos598d.sync import get_sync
from cos598d.toy import plain_loss, plain_model

WARM_UP_ROUNDS = 3


def look_at(comm: Communicator, name: str) -> dict[str, Any]:
    """The facts of the class called `name`: its name, its file, and the claims it must keep."""
    sync = get_sync(name)
    return {
        "class": sync.__name__,
        "file": inspect.getfile(sync),
        "exact": sync.exact,
        "claims": [claim.__name__ for claim in conformance.claims_of(sync)],
    }


def hold(comm: Communicator, name: str, claim: str) -> float:
    """Hold the sync to the claim, and return the seconds it took."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        getattr(conformance, claim)(get_sync(name), comm, Path(folder))
    return time.perf_counter() - started


def one_step(comm: Communicator, name: str) -> dict[str, int]:
    """Calls and bytes of this rank in one step of `plain_model`."""
    sync = get_sync(name)(comm, find_unused_parameters=False)
    module = sync.attach(plain_model())
    for step in range(2):  # torch's DDP arranges its buckets anew after the first
        comm.ledger = Ledger()
        plain_loss(module, comm.rank, step).backward()
        sync.finish()
        module.zero_grad(set_to_none=True)
    rows = [row for row in comm.ledger.rows if row.purpose == GRADIENTS]
    sync.detach()
    return {
        "calls": len(rows),
        "bytes_sent": sum(row.bytes_sent for row in rows),
        "bytes_received": sum(row.bytes_received for row in rows),
    }


def steps(comm: Communicator, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """The seconds of a step of `plain_model` under each sync, by round: the slowest rank's.

    A round is one step under each, in an order that turns from round to round; all ranks start a step together.
    """
    syncs = [get_sync(name)(comm, find_unused_parameters=False) for name in names]
    modules = [sync.attach(plain_model()) for sync in syncs]
    seconds: list[list[float]] = [[] for _ in names]
    for turn in range(WARM_UP_ROUNDS + rounds):
        for place in range(len(names)):
            which = (turn + place) % len(names)
            sync, module = syncs[which], modules[which]
            comm.all_reduce(torch.zeros(1), "all are here", purpose=AGREEMENT)
            started = time.perf_counter()
            plain_loss(module, comm.rank, turn).backward()
            sync.finish()
            seconds[which].append(time.perf_counter() - started)
            module.zero_grad(set_to_none=True)
    for sync in syncs:
        sync.detach()
    by_rank = comm.exchange([each[WARM_UP_ROUNDS:] for each in seconds])
    return {
        name: [max(times) for times in zip(*(ranks[which] for ranks in by_rank), strict=True)]
        for which, name in enumerate(names)
    }
