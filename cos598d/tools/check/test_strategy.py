"""Does a way to train that shards, or averages weights, do what one process does?

The toy model has what is often done wrong: tied, frozen, unused and float64 weights, and odd lengths. The weights after
a training are compared with those of one process.
"""

import contextlib
import functools
from dataclasses import dataclass

import pytest
import torch

from cos598d.comm.ledger import Ledger
from cos598d.parallel import parallelize
from cos598d.tools.check.driving import noted, whole_state
from cos598d.tools.exam.models import LARGE, SMALL, Shape, local_batch, toy_model

SECONDS = 30.0
CLOSE = 2e-4  # of a tensor's largest change. Rounding differs with the order of summation; a mistake is far larger
SHARED_ONCE = 1.3  # times the optimizer's state, that all ranks together may hold of what they shard
SGD = functools.partial(torch.optim.SGD, lr=0.1)
# With a small eps Adam turns rounding noise in near-zero gradients into whole steps.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=3e-2)


@dataclass(frozen=True)
class Case:
    """One training. has_new_sync: whether the third step is that of a new model with the state of the first."""

    shape: Shape = SMALL
    steps: int = 4
    micro_batches: int = 1
    clip: float = 0.0
    make: functools.partial = SGD
    has_new_sync: bool = False


CASES = {
    "steps": Case(),
    "adamw": Case(make=ADAMW),
    "micro-batches that are clipped": Case(micro_batches=3, clip=0.2),
    "large tensors": Case(LARGE, steps=1),
    "a new sync that goes on": Case(make=ADAMW, has_new_sync=True),
}


def train(comm, module, name, seed, case):
    """On a rank: the training through the door; its weights and buffers, and what its optimizer holds."""
    ledger, model = Ledger(), toy_model(seed + comm.rank, case.shape)
    with noted(comm, ledger):
        wrap = functools.partial(parallelize, make_optimizer=case.make, sync=name, ledger=ledger)
        wrapped, optimizer = wrap(model)
        for step in range(case.steps):
            if case.has_new_sync and step == 2:
                state = {key: value.clone() for key, value in wrapped.state()}
                wrapped.detach()
                model = toy_model(seed + 100 + comm.rank, case.shape)
                wrapped, optimizer = wrap(model)
                wrapped.load_state(state)
            for part in range(case.micro_batches):
                with contextlib.nullcontext() if part == case.micro_batches - 1 else wrapped.no_sync():
                    (loss_of(wrapped, seed, comm.rank, step, part) / case.micro_batches).backward()
            if case.clip:
                wrapped.clip_grad_norm_(case.clip)
            optimizer.step()
            optimizer.zero_grad()
        held, shards = bytes_of(optimizer), bool(wrapped.sync.shards)
        model.scale += comm.rank  # as a batch norm's, by a rank's own examples
        wrapped.settle()
        wrapped.detach()
    return {"state": whole_state(model), "held": held, "shards": shards}


@functools.lru_cache(maxsize=64)
def alone(seed, case, n):
    """One process on the batches of n ranks: the weights before and after, and the optimizer's bytes."""
    model = toy_model(seed, case.shape)
    start, optimizer = whole_state(model), case.make(model.parameters())
    for step in range(case.steps):
        for part in range(case.micro_batches):
            for rank in range(n):
                (loss_of(model, seed, rank, step, part) / case.micro_batches / n).backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return start, whole_state(model), bytes_of(optimizer)


def loss_of(model, seed, rank, step, part):
    return model(**local_batch(rank, 10 * step + part, True, seed))[0]


def bytes_of(optimizer):
    return sum(each.nbytes for kept in optimizer.state.values() for each in kept.values() if torch.is_tensor(each))


@pytest.mark.parametrize("case", CASES)
def test_trains_as_one_process(sync, seed, n, case):
    """After settle every rank has the weights and buffers of one process that trained on the whole batches."""
    world = sync(n, train, seed, CASES[case], seconds=SECONDS)
    start, end, _ = alone(seed, CASES[case], n)
    for rank, value in enumerate(world.values):
        for name, right in end.items():
            error, moved = (float((each - right).abs().max()) for each in (value["state"][name], start[name]))
            words = f"with {case} the tensor {name} is off by {error:.2e} on rank {rank}, and it moves by {moved:.2e}"
            world.require(error <= max(CLOSE * moved, 1e-7), words, rank)


def test_holds_its_share(sync, seed, n):
    """What is sharded is held once by all ranks together."""
    world = sync(n, train, seed, CASES["adamw"], seconds=SECONDS)
    held, right = sum(value["held"] for value in world.values), alone(seed, CASES["adamw"], n)[2]
    if not world.values[0]["shards"]:
        pytest.skip("every rank holds everything")
    words = f"the ranks together hold {held} bytes of the optimizer's state, and one process {right}"
    world.require(0.98 * right <= held <= SHARED_ONCE * right, words)
