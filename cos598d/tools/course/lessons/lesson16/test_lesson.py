"""Lesson 16, mixed precision: dtypes, averages in float32, and a loss scale whose steps are left out together."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from cos598d.tools.course.common import furthest, near
from cos598d.tools.course.lessons.lesson16.scaling import (
    MISTAKES,
    PATIENCE,
    RATE,
    SCALE,
    STEPS,
    InHalf,
    loss_at,
    simulate,
)
from cos598d.tools.exam.models import seeded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOOSE = 0.03  # of the largest gradient: bf16 has 8 bits of fraction, and ways differ in what they round
NAMES = {1e6: "inf", -1e6: "-inf"}  # what a factor of a loss makes of a gradient; any other one makes it NaN


class TwoLinear(nn.Module):
    """Two layers, whose outputs' dtypes it notes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 4)
        self.seen: list[str] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, 12) to (batch, 4)."""
        hidden = self.first(inputs)
        outputs = self.last(torch.tanh(hidden))
        self.seen += [name_of(hidden), name_of(outputs)]
        return outputs


def name_of(tensor: torch.Tensor) -> str:
    """Its dtype, without "torch."."""
    return str(tensor.dtype).removeprefix("torch.")


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (16, 12), and targets (16, 4) so large that their squares overflow in fp16."""
    generator = torch.Generator().manual_seed(seed + 16)
    return torch.randn(16, 12, generator=generator), 400 + 50 * torch.randn(16, 4, generator=generator)


def losses(comm: Any, module: Any, seed: int) -> dict[str, dict[str, Any]]:
    """On a rank: the dtypes, the loss and the gradients of the file's loss_of, by name of the dtype."""
    found = {}
    for name, dtype in DTYPES.items():
        model = seeded(seed, TwoLinear)
        loss = module.loss_of(model, *batch(seed), dtype)
        loss.backward()
        found[name] = {"seen": model.seen, "loss": name_of(loss), "value": loss.item()}
        found[name]["weights"] = name_of(model.first.weight)
        found[name]["grads"] = {key: None if p.grad is None else p.grad.float() for key, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("n", [2])
def test_computes_in_16_bits(ranks, seed, n):
    """Products are in the dtype that is asked for; loss, weights and gradients are in float32."""
    world = ranks(n, losses, seed)
    for name, dtype in DTYPES.items():
        found, right = world.values[0][name], f"{dtype}".removeprefix("torch.")
        model, (inputs, targets) = seeded(seed, TwoLinear), batch(seed)
        with torch.autocast("cpu", dtype=dtype):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        loss.backward()

        def require(holds: bool, words: str, name: str = name) -> None:
            world.require(holds, f"in {name}: {words}", about="loss_of")

        cast = f"the weights became {found['weights']}: they stay in float32, and autocast casts what it needs"
        require(found["weights"] == "float32", cast)
        seen = f"products are in {' and '.join(dict.fromkeys(found['seen']))}, expected {right}"
        once = "call the model once, under torch.autocast with dtype=dtype"
        require(found["seen"] == [right, right], f"{seen}: {once}")
        in_half = f"the loss is in {found['loss']}: compute it in float32, from outputs.float()"
        require(found["loss"] == "float32", in_half)
        overflow = "the loss is not finite: squares of these errors overflow in fp16; compute them in float32"
        require(math.isfinite(found["value"]), overflow)
        off = f"the loss is {found['value']:.5g}, expected {loss.item():.5g}"
        require(abs(found["value"] - loss.item()) <= LOOSE * loss.item(), off)
        for key, p in model.named_parameters():
            is_right = near(found["grads"][key], p.grad, LOOSE)
            require(is_right, f"the gradient of {key} is not that of the mean squared error")


def gradients(seed: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's gradients in 16 bits: of numbers whose sum overflows, and of 256 on rank 0 and small ones elsewhere."""
    drawn = torch.rand(64, generator=torch.Generator().manual_seed(seed + 1_000_003 * (rank + 1)))
    return {
        "fp16, large": (40000 + 20000 * drawn).half(),
        "fp16, small": ((1 + drawn.round()) * 2.0**-24).half(),
        "bf16": torch.full((64,), 256.0).bfloat16() if rank == 0 else (0.25 + drawn / 2).bfloat16(),
    }


def means(comm: Any, module: Any, seed: int) -> dict[str, Any]:
    """On a rank: what the file's mean_over_ranks makes of each of its gradients, and how many calls it makes."""
    found = {}
    for name, gradient in gradients(seed, comm.rank).items():
        begun = len(comm.rows)
        mean = module.mean_over_ranks(comm, gradient)
        is_tensor = isinstance(mean, torch.Tensor)
        kind = name_of(mean) if is_tensor else type(mean).__name__
        whole = mean.float() if is_tensor and mean.shape == gradient.shape else None
        found[name] = {"kind": kind, "mean": whole, "calls": len(comm.rows) - begun}
    return found


def total_of(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, rounded after each addition."""
    total = parts[0].clone()
    for each in parts[1:]:
        total += each
    return total


@pytest.mark.parametrize("n", [2, 3])
def test_averages_in_float32(ranks, seed, n):
    """The average of gradients in 16 bits: added up in float32, one all-reduce each, and in float32 afterwards."""
    world, by_rank = ranks(n, means, seed), [gradients(seed, rank) for rank in range(n)]
    for name in by_rank[0]:
        own = torch.stack([each[name] for each in by_rank])
        right, rounded, divided = own.float().mean(dim=0), total_of(own), own / n
        in_half = "the sum was made in 16 bits: make it float32 before the all-reduce, not after it"
        small = "each rank divides in 16 bits, where small numbers become 0: divide after the sum"
        ways = (
            ("that is the average rounded to 16 bits: add up, divide and leave it in float32", right.to(own.dtype)),
            (in_half, rounded / n),
            (in_half, rounded.float() / n),
            (small, divided.float().sum(0)),
            ("that is divided and added up in 16 bits: both belong in float32", total_of(divided)),
            ("that is the sum: divide by the number of ranks", own.float().sum(dim=0)),
        )
        for rank, found in enumerate(value[name] for value in world.values):
            mean, words = found["mean"], ""
            if mean is None:
                words = f"mean_over_ranks gives {found['kind']}, expected a float32 tensor of the gradient's shape"
            elif not near(mean, right):
                why = next((f": {said}" for said, made in ways if torch.equal(mean, made.float())), "")
                words = furthest(mean, right).removeprefix(", ") + why
            elif found["kind"] != "float32":
                words = f"the average is in {found['kind']}, expected float32"
            elif found["calls"] != 1:
                words = f"{found['calls']} calls are made, expected one all-reduce"
            world.require(not words, f"{name}: {words}", rank, about="mean_over_ranks")


def scaled_steps(comm: Any, module: Any, seed: int) -> torch.Tensor:
    """On a rank: weights and scale after each step of the file's LossScaler, (steps, 17)."""
    model, found = InHalf(seed), []
    scaler = module.LossScaler(comm, list(model.parameters()), RATE, SCALE, PATIENCE)
    for step in range(len(STEPS)):
        scaler.backward(loss_at(model, seed, comm.rank, comm.world_size, step))
        scaler.step()
        found.append(model.state(float(scaler.scale)))
    return torch.stack(found)


def alike(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Whether states of (steps, ranks, 17) are equal up to rounding, or both not finite, by step and rank."""
    one, other = (each.where(each.isfinite(), math.nan) for each in (found, right))
    return torch.isclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True).all(dim=-1)


@pytest.mark.parametrize("n", [2, 3])
def test_steps_together(ranks, seed, n):
    """Small gradients survive; a step with an inf on any rank is left out on all; the scale follows its rule."""
    world = ranks(n, scaled_steps, seed)
    found, right = torch.stack(world.values, dim=1), simulate(seed, n)
    if alike(found, right).all():
        return
    step, rank = (~alike(found, right)).nonzero()[0].tolist()
    bad = [f"rank {each % n} has {NAMES.get(factor, 'NaN')}" for each, factor in STEPS[step].items()]
    what = f"in which {' and '.join(bad)}" if bad else "in which all gradients are finite"
    (*weights, scale), (*right_weights, right_scale) = found[step, rank].tolist(), right[step, rank].tolist()
    words = f"the scale is {scale:g}, expected {right_scale:g}"
    if scale == right_scale:
        words = f"element 0 of the weight is {weights[0]:.7g}, expected {right_weights[0]:.7g}"
    words = next((way.words for way in MISTAKES if alike(found, simulate(seed, n, way)).all()), words)
    world.fail(f"after step {step + 1}, {what}, rank {rank}: {words}", rank, about="LossScaler.step")
