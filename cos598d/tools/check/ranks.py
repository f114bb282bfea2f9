"""A check's work on each rank, where a student's code runs; and what the check makes of its measured cost."""

import contextlib
import inspect
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import AGREEMENT, GRADIENTS
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.estimate import Cost
from cos598d.tools.check.claims import CLAIMS
from cos598d.tools.check.claims.base import MakeSync, OnRank
from cos598d.tools.check.evidence import Evidence
from cos598d.tools.check.noting import NotingCommunicator
from cos598d.tools.check.toy import plain_loss, plain_model
from cos598d.tools.check.trace import trace_direct_calls

WARM_UP_ROUNDS = 3
MOST_DIRECT_CALLS = 20


def describe(comm: Communicator, name: str, folder: str | None = None) -> dict[str, Any]:
    """The class called `name`: its name, its file, and whether it declares itself exact.

    `folder` becomes the working directory before its file is loaded.
    """
    if folder is not None:
        os.chdir(folder)
    sync = get_sync(name)
    return {"class": sync.__name__, "file": inspect.getfile(sync), "exact": bool(sync.exact)}


def is_description(value: Any) -> bool:
    """Whether that is what `describe` returns."""
    kinds = {"class": str, "file": str, "exact": bool}
    return isinstance(value, dict) and {key: type(each) for key, each in value.items()} == kinds


def observe_by_name(
    comm: Communicator, name: str, claims: Sequence[str], nonce: int, folder: str | None = None
) -> None:
    """Drive the sync called `name` for these claims, and hand in the results. `folder` is as in `describe`."""
    if folder is not None:
        os.chdir(folder)
    direct: list[str] = []
    trace_direct_calls(direct.append)  # before the file is loaded, which may keep functions under its own names
    sync = get_sync(name)
    observe(comm, sync, claims, nonce, direct, inspect.getfile(sync))


def observe(
    comm: Communicator,
    make_sync: MakeSync,
    claims: Sequence[str],
    nonce: int,
    direct: Sequence[str] = (),
    file: str = "",
) -> None:
    """As `observe_by_name`, for a sync's constructor from `file`.

    `direct` are calls that bypassed the communicator.
    """
    noting, evidence = NotingCommunicator(comm, file), Evidence(comm.rank, nonce)
    for claim in CLAIMS:
        if claim.name in claims:
            with tempfile.TemporaryDirectory() as own:
                claim.observe(OnRank(claim.name, make_sync, noting, evidence, Path(own)))
            noting.ledger = Ledger()
    evidence.report("", "direct calls", list(direct)[:MOST_DIRECT_CALLS])
    evidence.hand_in()


def cost_of_step(comm: Communicator, name: str) -> dict[str, dict[str, int] | None]:
    """Calls and bytes of this rank in one step of `plain_model`: measured, and by the class's own `calls`.

    None if it has no `calls`, or has inherited them from another file.
    """
    sync = get_sync(name)(comm, find_unused_parameters=False)
    module = sync.attach(plain_model())
    for step in range(2):  # torch's DDP rebuilds its buckets after the first step
        comm.ledger = Ledger()
        plain_loss(module, comm.rank, step).backward()
        sync.finish()
        module.zero_grad(set_to_none=True)
    rows = [row for row in comm.ledger.rows if row.purpose == GRADIENTS]
    sync.detach()
    made = Cost(len(rows), sum(row.bytes_sent for row in rows), sum(row.bytes_received for row in rows))
    kind, stated = type(sync), None
    if getattr(kind.calls, "__module__", None) == kind.__module__:  # it must not be just any attribute of that name
        with contextlib.suppress(Exception):
            stated = kind.expected(sizes_of(plain_model()), comm.world_size, comm.rank)
    return {"made": vars(made), "stated": vars(stated) if stated and stated.calls is not None else None}


def are_samples(value: Any, names: Sequence[str], rounds: int) -> bool:
    """Whether that is what `seconds_of_steps` returns."""
    if not isinstance(value, dict) or list(value) != list(names):
        return False
    seconds = [each for times in value.values() if isinstance(times, list) for each in times]
    return len(seconds) == len(names) * rounds and all(type(s) is float and 0 < s < math.inf for s in seconds)


def seconds_of_steps(comm: Communicator, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """The seconds of a step of `plain_model` under each sync, by round: the slowest rank's.

    A round is one step under each, in an order that rotates from round to round; all ranks start a step together.
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


def sizes_of(model: nn.Module) -> list[tuple[int, int]]:
    """Elements and bytes per element of its parameters."""
    return [(p.numel(), p.element_size()) for p in model.parameters()]


def compare(name: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measured cost of every rank, and the cost by formula of the nearest registered sync.

    answers: `ranks.cost_of_step` of each rank. If your own class has `calls`, it is compared with these. Otherwise
    nearest is the sync whose calls and bytes differ least, as ratios, over all ranks. Of equal ones, it is the sync
    itself, then the first in the registry.
    """
    sizes = sizes_of(plain_model())
    made = [each["made"] for each in answers]
    found = [Cost(**each) for each in made]
    if name not in SYNCS and all(each["stated"] for each in answers):
        return _beside(name, sizes, found, [Cost(**each["stated"]) for each in answers])
    candidates: dict[str, list[Cost]] = {}
    for other in sorted(SYNCS, key=lambda each: each != name):
        costs = [get_sync(other).expected(sizes, len(made), rank) for rank in range(len(made))]
        stated = [cost for cost in costs if cost and cost.calls is not None]
        if stated == costs:
            candidates[other] = stated
    nearest = min(candidates, key=lambda each: _distance(found, candidates[each]))
    return _beside(nearest, sizes, found, candidates[nearest])


def _beside(nearest: str, sizes: Sequence[tuple[int, int]], found: list[Cost], formula: list[Cost]) -> dict[str, Any]:
    return {
        "world_size": len(found),
        "gradient_bytes": sum(elements * size for elements, size in sizes),
        "tensors": len(sizes),
        "nearest": nearest,
        "is_equal": found == formula,
        "ranks": [
            {"rank": rank, "made": vars(cost), "formula": vars(formula[rank])} for rank, cost in enumerate(found)
        ],
    }


def is_cost(value: Any) -> bool:
    """Whether a rank has answered with calls and bytes, as `ranks.cost_of_step` does."""
    names = {"calls", "bytes_sent", "bytes_received"}

    def counts(cost: Any) -> bool:
        return isinstance(cost, dict) and set(cost) == names and all(type(n) is int and n >= 0 for n in cost.values())

    is_answer = isinstance(value, dict) and set(value) == {"made", "stated"}
    return is_answer and counts(value["made"]) and (value["stated"] is None or counts(value["stated"]))


def _distance(found: Sequence[Cost], expected: Sequence[Cost]) -> float:
    pairs = [
        pair
        for mine, other in zip(found, expected, strict=True)
        for pair in zip(vars(mine).values(), vars(other).values(), strict=True)
    ]
    # Numbers range from a few calls to millions of bytes, and include zeros.
    return sum(abs(math.log((mine + 1) / (other + 1))) for mine, other in pairs)
