"""Lesson 17, when one copy does not fit: an MLP cut over ranks, compared with one process; then a pipeline."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cos598d.tools.course.common import furthest, near
from cos598d.tools.course.held import SPARE, held_bytes, settled
from cos598d.tools.course.lessons.lesson17.pipeline import (
    BACKWARD,
    FORWARD,
    Stage,
    micro_batches,
    run_pipeline,
    units_of_time,
)

NARROW, WIDE, STEPS = 6, 48, 2
PARTS = ("up", "up_bias", "down", "down_bias")
Tensors = dict[str, torch.Tensor]


def mlp_weights(seed: int) -> list[torch.Tensor]:
    """The weights of the whole MLP, in the order of PARTS."""
    draw = torch.Generator().manual_seed(seed + 17)
    shapes = ((NARROW, WIDE), (WIDE,), (WIDE, NARROW), (NARROW,))
    return [torch.randn(shape, generator=draw) / shape[0] ** 0.5 for shape in shapes]


def mlp_step(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of a step, which require a gradient, and the gradient of its outputs: the same on every rank."""
    draw = torch.Generator().manual_seed(seed + 100 + step)
    rows = 3 + (seed + 2 * step) % 5
    inputs, gradient = (torch.randn(rows, NARROW, generator=draw) for _ in range(2))
    return inputs.requires_grad_(), gradient


def part_of(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What a rank keeps of one of the MLP's weights."""
    return whole if name == "down_bias" else whole.chunk(size, dim=1 if name == "up" else 0)[rank]


def parts(mlp: Any) -> dict[str, torch.Tensor | None]:
    """The four attributes of a student's MLP, None for what is no tensor."""
    found = {name: getattr(mlp, name, None) for name in PARTS}
    return {name: each if isinstance(each, torch.Tensor) else None for name, each in found.items()}


def most_held(size: int) -> float:
    """Bytes of the MLP's weights that one of `size` ranks may hold."""
    return SPARE * sum(part_of(*each, 0, size).numel() * 4 for each in zip(PARTS, mlp_weights(0), strict=True))


def hold(comm: Any, module: Any, seed: int) -> dict[str, Any]:
    """On a rank: the bytes that the file's MLP holds, and its parts."""
    before, given = held_bytes(), mlp_weights(seed)
    mlp = module.ParallelMLP(comm, *given)
    del given
    held = settled(lambda: held_bytes() - before, most_held(comm.world_size))
    return {"held": held, "parts": parts(mlp)}


@pytest.mark.parametrize("n", [2, 4])
def test_holds_its_part(ranks, seed, n):
    """A rank of ParallelMLP holds its columns of up and its rows of down, and no more of the weights."""
    world, most = ranks(n, hold, seed), most_held(n)
    for rank, value in enumerate(world.values):
        for name, whole in zip(PARTS, mlp_weights(seed), strict=True):
            found, right, where = value["parts"][name], part_of(name, whole, rank, n), f"on rank {rank} of {n}"
            has = "is no tensor" if found is None else f"is {tuple(found.shape)}"
            which = {"up": "the columns", "down": "the rows"}.get(name, "the elements")
            keep = f"keep {which} of rank {rank}" if right.shape != whole.shape else "every rank keeps all of it"
            words = f"ParallelMLP.{name} {has} {where}, expected {tuple(right.shape)}: {keep}"
            world.require(found is not None and found.shape == right.shape, words, rank, about="ParallelMLP")
            words = f"ParallelMLP.{name} {where} has the right shape and other values"
            if torch.equal(found, whole.T[rank::n].T if name == "up" else whole[rank::n]):
                words += f": that is one of every {n}, and a part is one block"
            words += "; keep r h/n to (r+1) h/n of rank r"
            world.require(torch.equal(found, right), words, rank, about="ParallelMLP")
    for rank, value in enumerate(world.values):
        words = f"rank {rank} of {n} holds {value['held']:,} bytes of the MLP, expected at most {most:,.0f}"
        words += ": clone your part, since a slice keeps the whole tensor"
        world.require(value["held"] <= most, words, rank, about="ParallelMLP")


def mlp_steps(comm: Any, module: Any, seed: int) -> list[dict[str, Any]]:
    """On a rank, of each step of the file's MLP: outputs and gradients, and the bytes of each call, both ways."""
    mlp, found = module.ParallelMLP(comm, *mlp_weights(seed)), []
    for step in range(STEPS):
        inputs, gradient = mlp_step(seed, step)
        begun = len(comm.rows)
        outputs = mlp(inputs)
        turned = len(comm.rows)
        outputs.backward(gradient)
        weights = parts(mlp)
        tensors = {"outputs": outputs, "inputs": inputs.grad}
        tensors |= {name: None if each is None else each.grad for name, each in weights.items()}
        traffic = comm.rows[begun:turned], comm.rows[turned:]
        found.append({"tensors": tensors, "traffic": [[row.bytes_sent for row in rows] for rows in traffic]})
        for each in weights.values():
            if each is not None:
                each.grad = None
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_mlp_is_that_of_one_process(ranks, seed, n):
    """Outputs and gradients are those of one process, step after step, with one all-reduce in each direction."""
    world = ranks(n, mlp_steps, seed, only=("all_reduce",))
    for step in range(STEPS):
        right, known = mlp_in_one_process(seed, step, n)
        for rank, value in enumerate(world.values):
            for name, whole in right.items():
                found, expected = (
                    value[step]["tensors"][name],
                    part_of(name, whole, rank, n) if name in PARTS else whole,
                )
                if near(found, expected):
                    continue
                slips = {words: each[rank] if each.dim() > 2 else each for words, each in known.get(name, {}).items()}
                wrong = wrong_tensor(found, expected, slips, n)
                what = "outputs are" if name == "outputs" else f"the gradient of {name} is"
                at = "CopyToRanks.backward" if name == "inputs" and "divided by n" in wrong else "ParallelMLP.__call__"
                at = "SumOverRanks.backward" if "backward of SumOverRanks" in wrong else at
                world.fail(f"ParallelMLP on rank {rank} of {n}, step {step + 1}: {what} {wrong}", rank, about=at)
    for step in range(STEPS):
        whole = mlp_step(seed, step)[1].nbytes
        most = round(2 * (n - 1) / n * whole)
        for rank, value in enumerate(world.values):
            for way, of, calls in zip(
                (FORWARD, BACKWARD), ("outputs", "inputs' gradient"), value[step]["traffic"], strict=True
            ):
                where = f"{way} of ParallelMLP on rank {rank} of {n}"
                words = f"{where} makes {len(calls)} calls, expected 1: an all-reduce of the {of}"
                world.require(len(calls) == 1, words, rank, about="ParallelMLP")
                words = f"{where} sends {calls[0]} bytes, expected 2(n-1)/n of {whole}, which is {most}"
                world.require(abs(calls[0] - most) <= 2, words, rank, about="ParallelMLP")


def mlp_in_one_process(seed: int, step: int, size: int) -> tuple[Tensors, dict[str, Tensors]]:
    """Outputs and gradients by name. And what a mistake gives instead, by name and by what is said of it: one tensor
    for all ranks, or one of each stacked."""
    whole = {name: each.requires_grad_() for name, each in zip(PARTS, mlp_weights(seed), strict=True)}
    inputs, gradient = mlp_step(seed, step)
    each_sum: list[Any] = []
    each_own: list[Any] = []
    for rank in range(size):
        up, up_bias, down = (part_of(name, whole[name], rank, size) for name in PARTS[:3])
        each_sum.append(functional.gelu(inputs @ up + up_bias) @ down)
        each_own += torch.autograd.grad(each_sum[-1], inputs, gradient, retain_graph=True)
    summands, own, bias = torch.stack(each_sum), torch.stack(each_own), whole["down_bias"]
    total = summands.sum(dim=0)
    (total + bias).backward(gradient)
    gradients = {"inputs": inputs.grad, **{name: each.grad for name, each in whole.items()}}
    without = functional.gelu(inputs @ whole["up"]) @ whole["down"] + bias
    mistakes = {
        "outputs": {
            "this rank's summand: all-reduce the outputs in forward": summands + bias,
            f"the sum with {size} times down_bias: add it after the all-reduce": total + size * bias,
            "the sum without down_bias: add it after the all-reduce": total,
            "those without up_bias: add it before gelu": without,
            "the average of the summands: they are added, and not divided by n": total / size + bias,
        },
        "inputs": {
            "only that of this rank's columns: all-reduce it in backward": own,
            "divided by n: the parts are added, not averaged": own.sum(dim=0) / size,
        },
    }
    right = {"outputs": (total + bias).detach()}
    return right | {name: each for name, each in gradients.items() if each is not None}, mistakes


def wrong_tensor(found: Any, right: torch.Tensor, known: Mapping[str, torch.Tensor], times: int, why: str = "") -> str:
    """What a tensor is instead of the right one, in words. `why`: what makes it `times` as large."""
    if found is None:
        return "missing: it is None, so backward did not come there"
    why = why or "backward of SumOverRanks adds nothing, since every rank has the whole gradient"
    known = {**known, f"{times} times too large: {why}": times * right}
    words = next((words for words, tensor in known.items() if near(found, tensor)), "")
    values = furthest(found, right).removeprefix(", ") if found.shape == right.shape else f"of shape {found.shape}"
    return f"{words} ({values})" if words else f"wrong: {values}"


@pytest.mark.parametrize("n", [2, 4])
def test_pipeline_is_that_of_one_process(ranks, seed, n):
    """The pipeline's losses and the gradients of the inputs and of every stage's weights are those of one process."""
    world, (inputs, targets) = ranks(n, run_pipeline, seed), micro_batches(seed)
    stages, m = [Stage(seed, rank) for rank in range(n)], len(inputs)
    losses = [functional.mse_loss(nn.Sequential(*stages)(x), y) for x, y in zip(inputs, targets, strict=True)]
    told = world.values[-1]["losses"]
    words = f"pipeline on the last rank of {n} returns {len(told)} losses, expected {m}"
    world.require(len(told) == m, words, n - 1, about="pipeline")
    for k, (found, loss) in enumerate(zip(told, (each.item() for each in losses), strict=True)):
        words = f"the loss of micro-batch {k} is {found:.5g}, expected {loss:.5g}: "
        is_divided = near(found * m, loss)
        words += "it is divided by m, which is only for backward" if is_divided else "return each one's mean, in order"
        world.require(near(found, loss), words, n - 1, about="pipeline")
    weights = [p for stage in stages for p in stage.parameters()]
    own = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    torch.stack(losses).mean().backward()
    right = {(0, f"micro-batch {k}'s inputs"): (x.grad, {}) for k, x in enumerate(inputs)}
    for place, p in enumerate(weights):
        known = {f"micro-batch {k}'s only, divided by m: add up those of all": g[place] / m for k, g in enumerate(own)}
        known |= {f"micro-batch {k}'s only: take the mean over all": g[place] for k, g in enumerate(own)}
        right[place // 2, f"the stage's {('weight', 'bias')[place % 2]}"] = (p.grad, known)
    for (rank, name), (tensor, known) in right.items():
        found = world.values[rank]["gradients"][name]
        if near(found, tensor):
            continue
        why = "it is that of the sum of the losses, expected that of their mean: divide each by m"
        words, hint = wrong_tensor(found, tensor, known, m, why), ""
        if found is None:
            hint = ": what a stage receives needs requires_grad_(), before stage(...)"
        elif words.startswith("wrong"):
            hint = ": do both neighbours take the micro-batches in the same order?"
        world.fail(f"the gradient of {name} on rank {rank} is {words}{hint}", rank, about="pipeline")


@pytest.mark.parametrize("n", [2, 4])
def test_bubble_is_small(ranks, seed, n):
    """Each stage talks to its neighbours, a message for each micro-batch, and the bubble is (p-1)/(m+p-1)."""
    world, inputs = ranks(n, run_pipeline, seed), micro_batches(seed)[0]
    m, size, computed = len(inputs), inputs[0].nbytes, [value["computed"] for value in world.values]
    for rank, trace in enumerate(world.traces):
        who = f"rank {rank} of {n}"
        for what in (FORWARD, BACKWARD):
            done = sum(name == what for name, _ in computed[rank])
            why = ": what a stage receives needs requires_grad_()" if what == BACKWARD and rank else ""
            words = f"{what} ran through {who}'s stage {done} times, expected {m}, once each micro-batch{why}"
            world.require(done == m, words, rank, about="pipeline")
        made = Counter((call.op, call.peer, call.bytes) for call in trace.calls)
        neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < n]
        right = Counter({(op, peer, size): m for op in ("send", "recv") for peer in neighbours})
        for op, peer, length in made | right:
            words = f"{who} makes {made[op, peer, length]} calls of {op} of {length} bytes with rank {peer}, expected "
            words += f"{right[op, peer, length]}: {size} bytes to and from each neighbour, for each micro-batch"
            world.require(made[op, peer, length] == right[op, peer, length], words, rank, about="pipeline")
    took, least = units_of_time(world.traces, computed), 2 * (m + n - 1)
    words = f"with one unit for each forward and each backward of a stage, {m} micro-batches take {took} units on {n} "
    words += f"ranks, expected {least}: the bubble is {1 - 2 * m / max(took, 1):.0%} of the time, expected "
    words += f"{1 - 2 * m / least:.0%}; "
    why = "send each micro-batch on as soon as it is computed"
    if took == 2 * m * n:
        why = "only one stage computes at a time: begin the next micro-batch while the first one is in the next stage"
    world.require(took <= least, words + why, about="pipeline")
