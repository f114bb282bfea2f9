"""Does a way to train, through the door, do what one process does? For every kind of sync.

Each case has one thing that is often done wrong; the model has several (model.py). The weights after training are
compared with one process's.
"""

import contextlib
import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from cos598d.comm.ledger import Ledger
from cos598d.parallel import parallelize
from cos598d.sync import get_sync
from cos598d.tools.check.driving import noted
from cos598d.tools.check.model import Examples, Parts, proof_model

STEPS, SECONDS = (16, 16, 16), 30.0
CLIP, TOO_HIGH = 0.2, 1e4  # the norms here are above 1, and far below this
SGD, ADAMW = "SGD", "AdamW"
# Relative to a tensor's largest change. Rounding differs with the order of summation; a real mistake is far larger.
CLOSE, CLOSE_DOUBLE, CLOSE_HALF = 2e-4, 1e-9, 8e-2
SHARED_ONCE = 1.3  # times the optimizer's state, that all ranks together may hold of what they shard


@dataclass(frozen=True)
class Case:
    """One training: what the model has, the sizes of its batches, and how it is stepped."""

    parts: Parts = Parts()
    batches: tuple[int, ...] = STEPS
    micro_batches: int = 1
    clip: float = 0.0
    optimizer: str = SGD
    rate: float = 0.2  # of SGD
    is_half: bool = False
    moves_on: bool = False

    @property
    def close(self) -> float:
        """How far weights may be off."""
        return CLOSE_DOUBLE if self.parts.is_double else CLOSE_HALF if self.is_half else CLOSE


CASES = {
    "gradients": Case(batches=(16,)),
    "steps": Case(),
    "adamw": Case(optimizer=ADAMW),
    "accumulation": Case(micro_batches=4),
    "clipping": Case(clip=CLIP),
    "no need to clip": Case(clip=TOO_HIGH),
    "unused parameter": Case(Parts(has_unused=True), optimizer=ADAMW),
    "used on one rank": Case(Parts(has_rarely_used=True)),
    "uneven last batch": Case(batches=(16, 7, 3)),
    "all at once": Case(Parts(has_unused=True), (16, 7, 3), micro_batches=4, clip=CLIP),
    "bf16": Case(micro_batches=4, clip=CLIP, is_half=True),
    "many steps": Case(Parts(is_double=True), batches=(16,) * 37, rate=0.02),
    "large tensors": Case(Parts(width=512), batches=(16,)),
    "going on": Case(optimizer=ADAMW, batches=(16,) * 4, moves_on=True),
}
# Layers that only some ranks call: what these syncs need of a script is said in their docstrings.
NOT_CLAIMED = {"used on one rank": ("zero3",)}


def optimizer_of(case):
    """Makes the case's optimizer of a list of parameters."""
    if case.optimizer == ADAMW:  # with a small eps Adam turns rounding noise in near-zero gradients into whole steps
        return functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=3e-2)
    return functools.partial(torch.optim.SGD, lr=case.rate, weight_decay=0.1 if len(case.batches) > 1 else 0.0)


def train(comm, module, name, seed, case):
    """On a rank: the training through the door; its weights and buffers, losses, and what its optimizer holds."""
    ledger, model = Ledger(), proof_model(seed + comm.rank, case.parts)
    examples, losses = Examples(case.batches, seed), []
    options = {"find_unused_parameters": case.parts.may_be_unused}
    known = {word: value for word, value in options.items() if word in get_sync(name).options_kind.names()}
    with noted(comm, ledger):
        wrap = functools.partial(parallelize, make_optimizer=optimizer_of(case), sync=name, ledger=ledger, **known)
        wrapped, optimizer = wrap(model)
        for step in range(len(case.batches)):
            if case.moves_on and step == 2:
                state = {key: value.clone() for key, value in wrapped.state()}
                wrapped.detach()
                model = proof_model(seed + 100 + comm.rank, case.parts)
                wrapped, optimizer = wrap(model)
                wrapped.load_state(state)
            shares = examples.shares(step, case.micro_batches, comm.rank, comm.world_size)
            losses.append(0.0)
            for place, (inputs, weight) in enumerate(shares):
                is_last = place == len(shares) - 1
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=case.is_half):
                        loss = wrapped(**inputs) * weight
                    losses[-1] += float(loss)
                    (loss * comm.world_size).backward()
            if case.clip:
                wrapped.clip_grad_norm_(case.clip)
            optimizer.step()
            optimizer.zero_grad()
        held = sum(each.nbytes for kept in optimizer.state.values() for each in kept.values() if torch.is_tensor(each))
        shards = bool(wrapped.sync.shards)
        wrapped.settle()
        wrapped.detach()
    state = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {"state": state, "losses": losses, "held": held, "shards": shards}


@functools.lru_cache(maxsize=64)
def alone(seed, case):
    """One process on the whole batches: the weights before and after, the losses, and the optimizer's bytes."""
    model, examples, losses = proof_model(seed, case.parts), Examples(case.batches, seed), []
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(case)(list(model.parameters()))
    for step in range(len(case.batches)):
        losses.append(0.0)
        for inputs, weight in examples.shares(step, case.micro_batches, 0, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.is_half):
                loss = model(**inputs) * weight
            losses[-1] += float(loss)
            loss.backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    held = sum(each.nbytes for kept in optimizer.state.values() for each in kept.values() if torch.is_tensor(each))
    end = {name: p.detach() for name, p in model.named_parameters()}
    return start, end, losses, held


@pytest.mark.parametrize("case", CASES)
def test_trains_as_one_process(sync, seed, n, case):
    """The weights and losses are those of one process on the whole batches."""
    name = sync.keywords["name"]
    if name in NOT_CLAIMED.get(case, ()) and n > 1:
        pytest.skip(f"with {name} all ranks must call the same layers")
    world = sync(n, train, seed, CASES[case], seconds=SECONDS)
    judge_weights(world, seed, CASES[case], f"with {case}")
    judge_losses(world, seed, CASES[case], f"with {case}")


def judge_weights(world, seed, case, where):
    start, end, *_ = alone(seed, case)
    for rank, value in enumerate(world.values):
        off = {}
        for name, right in end.items():
            moved, found = (right - start[name]).double(), (value["state"][name] - start[name]).double()
            largest, error = float(moved.abs().max()), float((found - moved).abs().max())
            bound = case.close * largest
            if not error <= max(bound, 1e-7 if not case.parts.is_double else 1e-15):
                off[name] = error / largest if largest else math.inf
        if not off:
            continue
        worst = max(off, key=off.get)
        moved, found = (end[worst] - start[worst]).double(), (value["state"][worst] - start[worst]).double()
        words = f"{where} the weight {worst} is off by {off[worst]:.1e} of its change on rank {rank}"
        factor = float((found * moved).sum() / moved.square().sum()) if moved.any() else math.nan
        if (found - factor * moved).norm() <= 1e-3 * found.norm() and len(case.batches) == 1:
            words += f": its step is {factor:.3g} times what it should be"
        words += f", and {len(off) - 1} more of {len(end)} are wrong" if len(off) > 1 else ""
        world.fail(words, rank)
    _are_single(world, case, where)


def _are_single(world, case, where):
    """In half precision the weights themselves must keep single precision, or many small steps would be lost."""
    for rank, value in enumerate(world.values if case.is_half else ()):
        for name, tensor in value["state"].items():
            is_half = tensor.numel() > 4 and torch.equal(tensor, tensor.bfloat16().float())
            world.require(not is_half or not tensor.any(), f"{where} the weight {name} is rounded to bf16", rank)


def judge_losses(world, seed, case, where):
    right = alone(seed, case)[2]
    for step, expected in enumerate(right):
        found = math.fsum(value["losses"][step] for value in world.values)
        is_close = abs(found - expected) <= max(case.close, 1e-6) * abs(expected)
        world.require(is_close, f"{where} the loss of step {step + 1} is {found:.6g} and should be {expected:.6g}")


def test_settles_buffers(sync, seed, n):
    """After settle every rank has rank 0's buffers, which each rank's own examples had changed."""
    world = sync(n, train, seed, CASES["steps"], seconds=SECONDS)
    first = world.values[0]["state"]["seen"]
    for rank, value in enumerate(world.values):
        is_same = torch.equal(value["state"]["seen"], first)
        world.require(is_same, f"after settle the buffer seen is not rank 0's on rank {rank}", rank)


def test_holds_its_share(sync, seed, n):
    """What is sharded is held once by all ranks together."""
    case = replace(CASES["adamw"], parts=Parts(width=32))
    world = sync(n, train, seed, case, seconds=SECONDS)
    held, right = sum(value["held"] for value in world.values), alone(seed, case)[3]
    if not world.values[0]["shards"]:
        pytest.skip("every rank holds everything")
    words = f"the ranks together hold {held} bytes of the optimizer's state, and one process {right}"
    world.require(0.98 * right <= held <= SHARED_ONCE * right, words)
