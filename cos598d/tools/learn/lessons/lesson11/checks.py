"""Lesson 11, hold less: ZeRO's first stage, whose checks are here, and its third, whose are in `zero3.py`."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.check.proof.model import Parts, ProofFeatures, ProofModel, proof_model
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.common import near
from cos598d.tools.learn.lessons.golf import golf_of
from cos598d.tools.learn.lessons.lesson11.stepping import OPTIMIZERS, SPARE, Optimizers, judge_bytes, wrong_step
from cos598d.tools.learn.lessons.lesson11.zero3 import (
    LAYERS,
    forward,
    golf_start,
    golf_weights,
    run_layer,
    start_weights,
    whole_bytes,
    zero3_holds,
    zero3_sends,
    zero3_steps,
)

# What is awkward in it: a weight in two places, a layer called twice, one that does not train, parameters of 1 and 3.
PARTS = Parts(is_tied=True, is_used_twice=True, has_frozen=True, has_small=True)
BATCH = 12
ADAMW = "AdamW"
GOLF_RANKS = 3


def train(on: OnLesson, kind: str, make: Optimizers, after) -> None:
    """Steps by a student's Zero1 with an optimizer of this kind; `after(step, model)` is called after each."""
    steps = OPTIMIZERS[kind][0]
    model, data = proof_model(on.nonce, PARTS), features(on.nonce, on.rank, steps)
    zero = on.student.Zero1(on.comm, model, make)
    for step in range(steps):
        loss_of(model, data, step, on.rank, on.world_size).backward()
        on.fresh_ledger()
        zero.step()
        after(step, model)


@Claim
def zero1_steps(on: OnLesson) -> None:
    """After Zero1's step all ranks have the weights of one process that steps by the average; no .grad is left."""
    for kind in OPTIMIZERS:

        def after(step: int, model: ProofModel, kind: str = kind) -> None:
            on.hand_in(label(kind, step), dict(model.named_parameters()))
            left = [name for name, p in model.named_parameters() if p.grad is not None]
            on.report(f"gradients left, {label(kind, step)}", left)

        train(on, kind, Optimizers(kind), after)


@zero1_steps.judgement
def _(world: World) -> None:
    like = dict(proof_model(0, PARTS).named_parameters())
    names = [name for name, p in like.items() if p.requires_grad]
    for kind, (steps, _) in OPTIMIZERS.items():
        right = one_process(world.nonce, world.size, kind)
        for step in range(steps):
            where = f"Zero1 with {kind}, step {step + 1}"
            own = own_gradients(world.nonce, world.size, right[step], step, steps) if kind != ADAMW else []
            by_rank = world.reported(f"gradients left, {label(kind, step)}", list)
            for rank, found in enumerate(world.handed_in(label(kind, step), like)):
                frozen = [n for n in like if n not in names and not near(found[n], right[0][n])]
                world.require(
                    not frozen, f"{where}: {' and '.join(frozen)} does not train, but has changed on rank {rank}", rank
                )
                missing = [name for name in names if found[name] is None]
                world.require(not missing, f"{where}: {' and '.join(missing)} is missing on rank {rank}", rank)
                if missing:
                    continue
                before, after = _flat(right[step], names), _flat(right[step + 1], names)
                words = wrong_step(before, _flat(found, names), after, own, rank)
                if words and kind == ADAMW and step:
                    words += "; the step before was right, so is there one optimizer for all steps?"
                world.require(not words, f"{where}, on rank {rank}: {words}", rank)
                left = f"the parameter {by_rank[rank][0]} still has a .grad" if by_rank[rank] else ""
                world.require(
                    not left, f"{where}, on rank {rank}: {left}, to which backward adds the next: set it to None", rank
                )
            if world.findings:
                return


@Claim
def zero1_shares_the_state(on: OnLesson) -> None:
    """A rank's optimizers hold at most 1.25 / n of AdamW's state, and those of all ranks together hold all of it."""
    make, held = Optimizers(ADAMW), []
    train(on, ADAMW, make, lambda step, model: held.append(make.state_bytes()))
    on.report("made", len(make.made))
    on.report("held", held)


@zero1_shares_the_state.judgement
def _(world: World) -> None:
    whole = 2 * trained_bytes()
    by_rank = world.reported("held", list)
    for rank, made in enumerate(world.reported("made", int)):
        world.require(made > 0, f"rank {rank} has never called make_optimizer", rank)
    for step in range(OPTIMIZERS[ADAMW][0]):
        held = [each[step] if len(each) > step and type(each[step]) is int else 0 for each in by_rank]
        most = SPARE * whole / world.size
        for rank, size in enumerate(held):
            words = f"rank {rank} of {world.size} holds {size:,} bytes of the optimizer's state after step {step + 1}, "
            words += f"{'all of it' if size >= whole else f'of {whole:,}'}, and should hold at most {most:,.0f}"
            world.require(size <= most, f"{words}: give make_optimizer only this rank's part", rank)
        words = f"after step {step + 1} all ranks together hold {sum(held):,} bytes of the optimizer's state"
        world.require(sum(held) >= whole, f"{words}, and {whole:,} are needed", 0)


@Claim
def zero1_sends(on: OnLesson) -> None:
    """In a step of Zero1 a rank sends at most 3(n-1)/n S bytes: an all-reduce and an all-gather."""
    sent: list[int] = []
    make = Optimizers(ADAMW)
    train(on, ADAMW, make, lambda step, model: sent.append(sum(row.bytes_sent for row in on.comm.ledger.rows)))
    on.report("sent", sent)


@zero1_sends.judgement
def _(world: World) -> None:
    tensors = sum(p.requires_grad for p in proof_model(0, PARTS).parameters())
    judge_bytes(world, "Zero1", 3, trained_bytes(), tensors)


def label(kind: str, step: int) -> str:
    """What a step is called."""
    return f"{kind}, step {step + 1}"


def trained_bytes() -> int:
    """Of all weights that train."""
    return sum(p.nbytes for p in proof_model(0, PARTS).parameters() if p.requires_grad)


def features(nonce: int, rank: int, steps: int) -> ProofFeatures:
    """The examples of so many steps, of which `rank` takes its share; other ranks have others."""
    return ProofFeatures((BATCH,) * steps, seed_of(nonce, rank))


def loss_of(model: nn.Module, data: ProofFeatures, step: int, rank: int, size: int) -> torch.Tensor:
    """A rank's loss on its share of a step's batch, a `size`-th of it."""
    return model(**data.collate(data.batches[step][rank::size]))[0]


def one_process(nonce: int, size: int, kind: str) -> list[dict[str, torch.Tensor]]:
    """The weights at the start and after each step of one process that has all ranks' examples."""
    steps, make = OPTIMIZERS[kind]
    model, data = proof_model(nonce, PARTS), [features(nonce, rank, steps) for rank in range(size)]
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    found = [_weights(model)]
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        torch.stack([loss_of(model, data[rank], step, rank, size) for rank in range(size)]).mean().backward()
        optimizer.step()
        found.append(_weights(model))
    return found


def own_gradients(nonce: int, size: int, weights: Mapping, step: int, steps: int) -> list[torch.Tensor]:
    """Each rank's gradient at these weights, of all that trains, flat."""
    model, data = proof_model(nonce, PARTS), [features(nonce, rank, steps) for rank in range(size)]
    for name, p in model.named_parameters():
        p.data.copy_(weights[name])
    wanted = [p for p in model.parameters() if p.requires_grad]
    gradients = (torch.autograd.grad(loss_of(model, data[rank], step, rank, size), wanted) for rank in range(size))
    return [torch.cat([g.flatten() for g in each]) for each in gradients]


def _weights(model: ProofModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _flat(weights: Mapping, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([weights[name].flatten() for name in names])


@Claim
def record(on: OnLesson) -> None:
    """A step of Zero3, after a first one."""
    zero = on.student.Zero3(on.comm, start_weights(on.nonce), Optimizers(ADAMW))
    for step in range(2):
        on.comm.exchange(step)
        on.comm.begin_record()
        loss = forward(zero, on.nonce, step, on.rank, on.world_size, run_layer)
        on.comm.computed("forward")
        loss.backward()
        on.comm.computed("backward")
        zero.step()
        on.comm.computed("step")
    on.report_events()


CHECKS = Checks(
    (
        Check(zero1_steps, (3, 2)),
        Check(zero1_shares_the_state, (3, 2)),
        Check(zero1_sends, (3,)),
        Check(zero3_steps, (3, 2), about="Zero3"),
        Check(zero3_holds, (3,), about="Zero3"),
        Check(zero3_sends, (3,), about="Zero3"),
    ),
    record=record,
    golf=golf_of(
        f"a step of Zero3 with {len(LAYERS)} layers of {whole_bytes():,} bytes together",
        GOLF_RANKS,
        3 * (GOLF_RANKS - 1) * whole_bytes() // GOLF_RANKS,  # two all-gathers, and half of an all-reduce
        golf_start,
        golf_weights,
        tolerance=1e-4,
    ),
)
