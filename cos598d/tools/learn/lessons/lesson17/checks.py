"""Lesson 17, when one copy does not fit: an MLP cut over ranks, compared with one process; then a pipeline."""

import time
from typing import Any

import torch
from torch.nn import functional

from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.common import bytes_of, near
from cos598d.tools.learn.lessons.lesson11.zero3 import held_bytes, settled
from cos598d.tools.learn.lessons.lesson17.pipeline import (
    BACKWARD,
    FORWARD,
    bubble_is_small,
    pipeline_is_that_of_one_process,
    run_pipeline,
    wrong_tensor,
)

ROWS, NARROW, WIDE = 5, 6, 48
PARTS = ("up", "up_bias", "down", "down_bias")
STEPS, SPARE = 2, 1.25
ASLEEP = 0.05  # seconds that a picture's forward or backward of a micro-batch takes

Tensors = dict[str, torch.Tensor]


def mlp_weights(nonce: int) -> list[torch.Tensor]:
    """The weights of the whole MLP, in the order of PARTS."""
    draw = torch.Generator().manual_seed(nonce + 17)
    shapes = ((NARROW, WIDE), (WIDE,), (WIDE, NARROW), (NARROW,))
    return [torch.randn(shape, generator=draw) / shape[0] ** 0.5 for shape in shapes]


def mlp_step(nonce: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of a step, which require a gradient, and the gradient of its outputs: the same on every rank."""
    draw = torch.Generator().manual_seed(nonce + 100 + step)
    inputs, gradient = (torch.randn(ROWS, NARROW, generator=draw) for _ in range(2))
    return inputs.requires_grad_(), gradient


def part_of(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What a rank keeps of one of the MLP's weights."""
    return whole if name == "down_bias" else whole.chunk(size, dim=1 if name == "up" else 0)[rank]


def parts(mlp: Any) -> dict[str, torch.Tensor | None]:
    """The four attributes of a student's MLP, None for what is no tensor."""
    found = {name: getattr(mlp, name, None) for name in PARTS}
    return {name: each if isinstance(each, torch.Tensor) else None for name, each in found.items()}


@Claim
def holds_its_part(on: OnLesson) -> None:
    """A rank of ParallelMLP holds its columns of up and its rows of down, and no more of the weights."""
    before = held_bytes()
    given = mlp_weights(on.nonce)
    mlp = on.student.ParallelMLP(on.comm, *given)
    del given
    most = most_held(on.world_size)
    on.report("held", settled(lambda: held_bytes() - before, most))
    found = parts(mlp)
    on.report("shapes", {name: None if each is None else list(each.shape) for name, each in found.items()})
    on.hand_in("parts", found)


@holds_its_part.judgement
def _(world: World) -> None:
    whole = dict(zip(PARTS, mlp_weights(world.nonce), strict=True))
    for rank, shapes in enumerate(world.reported("shapes", dict)):
        for name, tensor in whole.items():
            right = part_of(name, tensor, rank, world.size)
            if (shape := shapes.get(name)) != list(right.shape):
                has = "is no tensor" if shape is None else f"is {tuple(shape)}"
                which = {"up": "the columns", "down": "the rows"}.get(name, "the elements")
                keep = f"keep {which} of rank {rank}" if right.shape != tensor.shape else "every rank keeps all of it"
                words = f"ParallelMLP.{name} {has} on rank {rank} of {world.size}, expected {tuple(right.shape)}"
                world.find(rank, f"{words}: {keep}")
                return
        own = {name: part_of(name, tensor, rank, world.size) for name, tensor in whole.items()}
        for name, part in world.evidence[rank].get(world.claim, "parts", own).items():
            if part is None or not torch.equal(part, own[name]):
                words = f"ParallelMLP.{name} on rank {rank} of {world.size} has the right shape and other values"
                every = whole[name].T[rank :: world.size].T if name == "up" else whole[name][rank :: world.size]
                if part is not None and part.shape == every.shape and torch.equal(part, every):
                    words += f": that is one of every {world.size}, and a part is one block"
                world.find(rank, f"{words}; keep r h/n to (r+1) h/n of rank r")
                return
    most = most_held(world.size)
    for rank, held in enumerate(world.reported("held", int)):
        words = f"rank {rank} of {world.size} holds {held:,} bytes of the MLP, expected at most {most:,.0f}"
        world.require(held <= most, f"{words}: clone your part, since a slice keeps the whole tensor", rank)


def most_held(size: int) -> float:
    """Bytes of the MLP's weights that one of `size` ranks may hold."""
    return SPARE * sum(bytes_of(part_of(n, t, 0, size)) for n, t in zip(PARTS, mlp_weights(0), strict=True))


@Claim
def mlp_is_that_of_one_process(on: OnLesson) -> None:
    """Outputs and gradients are those of one process, step after step, with one all-reduce in each direction."""
    mlp = on.student.ParallelMLP(on.comm, *mlp_weights(on.nonce))
    traffic = []
    for step in range(STEPS):
        inputs, gradient = mlp_step(on.nonce, step)
        ledger = on.fresh_ledger()
        outputs = mlp(inputs)
        traffic.append([row.bytes_sent for row in ledger.rows])
        ledger = on.fresh_ledger()
        outputs.backward(gradient)
        traffic.append([row.bytes_sent for row in ledger.rows])
        weights = parts(mlp)
        gradients = {name: None if each is None else each.grad for name, each in weights.items()}
        on.hand_in(f"step {step + 1}", {"outputs": outputs, "inputs": inputs.grad, **gradients})
        for each in weights.values():
            if each is not None:
                each.grad = None
    on.report("traffic", traffic)


@mlp_is_that_of_one_process.judgement
def _(world: World) -> None:
    judge_values(world)
    if not world.findings:
        judge_calls(world)


def judge_values(world: World) -> None:
    """That outputs and gradients are those of one process."""
    n = world.size
    for step in range(STEPS):
        right, known = mlp_in_one_process(world.nonce, step, n)
        for rank in range(n):
            like = {name: right[name] for name in ("outputs", "inputs")}
            like |= {name: part_of(name, right[name], rank, n) for name in PARTS}
            found = world.evidence[rank].get(world.claim, f"step {step + 1}", like)
            for name, expected in like.items():
                if near(found[name], expected):
                    continue
                slips = {words: each[rank] if each.dim() > 2 else each for words, each in known.get(name, {}).items()}
                wrong = wrong_tensor(found[name], expected, slips, n)
                what = "outputs are" if name == "outputs" else f"the gradient of {name} is"
                at = "ParallelMLP.__call__"
                if name == "inputs" and "divided by n" in wrong:
                    at = "CopyToRanks.backward"
                if "backward of SumOverRanks" in wrong:
                    at = "SumOverRanks.backward"
                world.find(rank, f"ParallelMLP on rank {rank} of {n}, step {step + 1}: {what} {wrong}", at=at)
                return


def judge_calls(world: World) -> None:
    """That there is one call in each direction, of the size of the outputs."""
    whole = ROWS * NARROW * 4
    right = round(2 * (world.size - 1) / world.size * whole)
    for rank, traffic in enumerate(world.reported("traffic", list)):
        for place, calls in enumerate(traffic):
            where = f"{(FORWARD, BACKWARD)[place % 2]} of ParallelMLP on rank {rank} of {world.size}"
            words = f"{where} makes {number_of(len(calls), 'call')}, expected 1: an all-reduce of "
            words += "the inputs' gradient" if place % 2 else "the outputs"
            world.require(len(calls) == 1, words, rank)
            if len(calls) == 1:
                words = f"{where} sends {calls[0]} bytes, expected 2(n-1)/n of {whole}, which is {right}"
                world.require(abs(calls[0] - right) <= 2, words, rank)


def mlp_in_one_process(nonce: int, step: int, size: int) -> tuple[Tensors, dict[str, Tensors]]:
    """Outputs and gradients by name. And what a mistake gives instead, by name and by what is said of it: one tensor
    for all ranks, or one of each stacked."""
    whole = {name: each.requires_grad_() for name, each in zip(PARTS, mlp_weights(nonce), strict=True)}
    inputs, gradient = mlp_step(nonce, step)
    summands: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    for rank in range(size):
        up, up_bias, down = (part_of(name, whole[name], rank, size) for name in PARTS[:3])
        summands.append(functional.gelu(inputs @ up + up_bias) @ down)
        own += torch.autograd.grad(summands[-1], inputs, gradient, retain_graph=True)
    total, bias = torch.stack(summands).sum(dim=0), whole["down_bias"]
    (total + bias).backward(gradient)
    right = {"outputs": (total + bias).detach(), "inputs": inputs.grad}
    right |= {name: each.grad for name, each in whole.items()}
    mistakes = {
        "outputs": {
            "this rank's summand: all-reduce the outputs in forward": torch.stack(summands) + bias,
            f"the sum with {size} times down_bias: add it after the all-reduce": total + size * bias,
            "the sum without down_bias: add it after the all-reduce": total,
            "those without up_bias: add it before gelu": functional.gelu(inputs @ whole["up"]) @ whole["down"] + bias,
            "the average of the summands: they are added, and not divided by n": total / size + bias,
        },
        "inputs": {
            "only that of this rank's columns: all-reduce it in backward": torch.stack(own),
            "divided by n: the parts are added, not averaged": torch.stack(own).sum(dim=0) / size,
        },
    }
    return {n: e for n, e in right.items() if e is not None}, mistakes


@Claim
def record(on: OnLesson) -> None:
    """A step of the MLP, then a pipeline of 4 micro-batches whose forward and backward take 50 ms each, asleep."""
    mlp = on.student.ParallelMLP(on.comm, *mlp_weights(on.nonce))
    inputs, gradient = mlp_step(on.nonce, 0)
    on.comm.exchange("all are here")
    on.comm.begin_record()
    time.sleep(ASLEEP)
    mlp(inputs).backward(gradient)
    of_mlp = on.comm.events
    run_pipeline(on, 4, ASLEEP)
    on.comm.events[:0] = of_mlp
    on.report_events()


CHECKS = Checks(
    (
        Check(holds_its_part, (2, 4), about="ParallelMLP"),
        Check(mlp_is_that_of_one_process, (2, 4), about="ParallelMLP", only=("all_reduce",)),
        Check(pipeline_is_that_of_one_process, (2, 4), about="pipeline"),
        Check(bubble_is_small, (2, 4), about="pipeline"),
    ),
    record=record,
)
