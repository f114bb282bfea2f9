"""Lesson 11, hold less: ZeRO's first stage and its third, compared with one process; what a rank holds and sends."""

from typing import Any

import pytest
import torch
from torch import nn

from cos598d.tools.course.common import near
from cos598d.tools.course.held import SPARE
from cos598d.tools.course.lessons.lesson11.stepping import (
    ADAMW,
    OPTIMIZERS,
    require_bytes,
    state_bytes,
    wrong_step,
)
from cos598d.tools.course.lessons.lesson11.zero3 import (
    LAYERS,
    gradient,
    most_held,
    start_weights,
    whole_bytes,
    zero3_memory,
    zero3_steps,
)
from cos598d.tools.exam.models import seeded

WORDS, WIDTH, INNER, TOKENS, SHARE = 23, 8, 16, 6, 4
ONE_OPTIMIZER = "; the step before was right, so is there one optimizer for all steps?"


class Awkward(nn.Module):
    """A weight in two places, a layer called twice, one that does not train, parameters of 1 and 3 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.one, self.three = nn.Parameter(torch.rand(1) + 0.5), nn.Parameter(torch.rand(3))
        self.output = nn.Linear(WIDTH, WORDS)
        self.output.weight = self.embedding.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) and (batch,) to the loss, four times as large so that gradients are not small."""
        state = self.embedding(words).mean(dim=1)
        state = state + self.frozen(state) + torch.tanh(self.twice(state))
        state = state + self.down(torch.tanh(self.up(state)))
        state = state * self.one + nn.functional.pad(self.three, (0, WIDTH - 3))
        return 4 * nn.functional.cross_entropy(self.output(state + torch.tanh(self.twice(state))), labels)


def batch(seed: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's words (SHARE, TOKENS) and labels (SHARE,) in a step."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * (rank + 1) + step)
    return torch.randint(0, WORDS, (SHARE, TOKENS), generator=generator), torch.randint(
        0, WORDS, (SHARE,), generator=generator
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train."""
    return [p for p in model.parameters() if p.requires_grad]


def zero1_steps(comm: Any, module: Any, seed: int, kind: str) -> dict[str, Any]:
    """On a rank, after each step of a student's Zero1: weights, .grads left, bytes of state held, bytes sent."""
    model = seeded(seed, Awkward)
    steps, make = OPTIMIZERS[kind]
    zero = module.Zero1(comm, model, make)
    found: dict[str, Any] = {"weights": [], "left": [], "held": [], "sent": []}
    for step in range(steps):
        model(*batch(seed, comm.rank, step)).backward()
        begun = len(comm.rows)
        zero.step()
        found["sent"].append(sum(row.bytes_sent for row in comm.rows[begun:]))
        found["weights"].append(weights_of(model))
        found["left"].append([name for name, p in model.named_parameters() if p.grad is not None])
        found["held"].append(state_bytes())
    return found


@pytest.mark.parametrize("n", [3, 2])
def test_zero1_steps(ranks, seed, n):
    """After Zero1's step all ranks have the weights of one process that steps by the average; no .grad is left."""
    for kind, (steps, make) in OPTIMIZERS.items():
        world, model = ranks(n, zero1_steps, seed, kind), seeded(seed, Awkward)
        optimizer, names = make(trained(model)), [name for name, p in model.named_parameters() if p.requires_grad]
        for step in range(steps):
            where, start = f"Zero1 with {kind}, step {step + 1}", weights_of(model)
            losses = [model(*batch(seed, rank, step)) for rank in range(n)]
            each = [torch.autograd.grad(loss, trained(model), retain_graph=True) for loss in losses]
            own = [torch.cat([part.flatten() for part in parts]) for parts in each]
            optimizer.zero_grad(set_to_none=True)
            torch.stack(losses).mean().backward()
            optimizer.step()
            before, right = (torch.cat([some[x].flatten() for x in names]) for some in (start, weights_of(model)))
            for rank, value in enumerate(world.values):
                found, left = value["weights"][step], value["left"][step]
                frozen = [name for name in start if name not in names and not near(found[name], start[name])]
                told = f"{where}: {' and '.join(frozen)} does not train, but has changed on rank {rank}"
                world.require(not frozen, told, rank)
                flat = torch.cat([found[name].flatten() for name in names])
                words = wrong_step(before, flat, right, own if kind != ADAMW else [])
                words += ONE_OPTIMIZER if words and kind == ADAMW and step else ""
                world.require(not words, f"{where}, on rank {rank}: {words}", rank)
                told = f"{where}, on rank {rank}: the parameter {left[0] if left else ''} still has a .grad"
                world.require(not left, f"{told}, to which backward adds the next: set it to None", rank)


@pytest.mark.parametrize("n", [3, 2])
def test_zero1_shares_the_state(ranks, seed, n):
    """A rank's optimizers hold at most 1.25 / n of AdamW's state, and those of all ranks together hold all of it."""
    world, whole = ranks(n, zero1_steps, seed, ADAMW), 2 * sum(p.nbytes for p in trained(Awkward()))
    most = SPARE * whole / n
    for step in range(OPTIMIZERS[ADAMW][0]):
        held = [value["held"][step] for value in world.values]
        for rank, size in enumerate(held):
            words = f"rank {rank} of {n} holds {size:,} bytes of the optimizer's state after step {step + 1}, "
            words += f"{'all of it' if size >= whole else f'of {whole:,}'}, and should hold at most {most:,.0f}"
            world.require(size <= most, f"{words}: give make_optimizer only this rank's part", rank)
        words = f"after step {step + 1} all ranks together hold {sum(held):,} bytes of the optimizer's state"
        world.require(sum(held) >= whole, f"{words}, and {whole:,} are needed")


@pytest.mark.parametrize("n", [3])
def test_zero1_sends(ranks, seed, n):
    """In a step of Zero1 a rank sends at most 3(n-1)/n S bytes: an all-reduce and an all-gather."""
    tensors = trained(Awkward())
    require_bytes(ranks(n, zero1_steps, seed, ADAMW), "Zero1", 3, sum(p.nbytes for p in tensors), len(tensors))


@pytest.mark.parametrize("n", [3, 2])
def test_zero3_steps(ranks, seed, n):
    """After Zero3's step layers compute with the weights of one process that steps by the average."""
    for kind, (steps, make) in OPTIMIZERS.items():
        world, weights = ranks(n, zero3_steps, seed, kind), [each.requires_grad_() for each in start_weights(seed)]
        optimizer = make(weights)
        for step in range(steps):
            before = torch.cat([each.detach() for each in weights])
            own = [gradient(weights, seed, step, rank, n) for rank in range(n)]
            mean = torch.stack(own).mean(dim=0).split([each.numel() for each in weights])
            for each, part in zip(weights, mean, strict=True):
                each.grad = part.clone()
            optimizer.step()
            right, where = torch.cat([each.detach() for each in weights]), f"Zero3 with {kind}, step {step + 1}"
            for rank, value in enumerate(world.values):
                found = value["weights"][step]
                missing = [name for name in map("layer {}".format, range(len(LAYERS))) if name not in found]
                world.require(not missing, f"{where}: {' and '.join(missing)} was not run on rank {rank}", rank)
                words = wrong_step(before, torch.cat([*found.values()]), right, own if kind != ADAMW else [])
                words += ONE_OPTIMIZER if words and kind == ADAMW and step else ""
                world.require(not words, f"{where}, on rank {rank}: {words}", rank)


@pytest.mark.parametrize("n", [3])
def test_zero3_holds(ranks, seed, n):
    """Between steps a rank holds an n-th of weights and state; forward keeps no layer's whole weights for backward."""
    world, whole, most = ranks(n, zero3_memory, seed), whole_bytes(), most_held(n)
    for rank, found in enumerate(world.values):
        who = f"Zero3 on rank {rank} of {n}"
        words = f"{who}: {found['kept']:,} bytes of whole weights are still there after the constructor has returned, "
        words += "expected none: keep a clone of your part, since a slice keeps the tensor that it is a slice of"
        world.require(not found["kept"], words, rank)
        words = f"{who}: {found['left']:,} bytes of layers' whole weights are still there after forward, expected none"
        world.require(not found["left"], f"{words}: backward has to gather them once more", rank)
        words = f"{who} holds {found['held']:,} bytes after a step, expected at most {most:,.0f}, its n-th of "
        words += f"{3 * whole:,} bytes of weights and AdamW's state, and a quarter more"
        world.require(found["held"] <= most, words, rank)


@pytest.mark.parametrize("n", [3])
def test_zero3_sends(ranks, seed, n):
    """In a step of Zero3 a rank sends at most 4(n-1)/n S bytes: two all-gathers and an all-reduce."""
    require_bytes(ranks(n, zero3_steps, seed, ADAMW), "Zero3", 4, whole_bytes(), 2 * len(LAYERS))
