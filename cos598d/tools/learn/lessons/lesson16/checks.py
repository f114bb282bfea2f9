"""Lesson 16, mixed precision: dtypes, averages in float32, and a loss scale whose steps are left out together."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.check.toy import seeded
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.common import furthest_off, near

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOAT32 = "float32"
LOOSE = 0.03  # of the largest gradient: bf16 has 8 bits of fraction, and ways differ in what they round


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


def batch(nonce: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (16, 12), and targets (16, 4) so large that their squares overflow in fp16."""
    generator = torch.Generator().manual_seed(nonce + 16)
    return torch.randn(16, 12, generator=generator), 400 + 50 * torch.randn(16, 4, generator=generator)


@Claim
def computes_in_16_bits(on: OnLesson) -> None:
    """Products are in the dtype that is asked for; loss, weights and gradients are in float32."""
    for name, dtype in DTYPES.items():
        model = seeded(on.nonce, TwoLinear)
        loss = on.student.loss_of(model, *batch(on.nonce), dtype)
        loss.backward()
        weights = name_of(model.first.weight)
        on.report(name, {"seen": model.seen, "loss": name_of(loss), "value": loss.item(), "weights": weights})
        on.hand_in(name, {key: None if p.grad is None else p.grad.float() for key, p in model.named_parameters()})


@computes_in_16_bits.judgement
def _(world: World) -> None:
    for name, dtype in DTYPES.items():
        found, right = world.reported(name, dict)[0], f"{dtype}".removeprefix("torch.")
        model = seeded(world.nonce, TwoLinear)
        inputs, targets = batch(world.nonce)
        with torch.autocast("cpu", dtype=dtype):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        loss.backward()
        words = ""
        if found["weights"] != FLOAT32:
            words = f"the weights became {found['weights']}: they stay in float32, and autocast casts what it needs"
        elif found["seen"] != [right, right]:
            words = (
                f"products are in {' and '.join(dict.fromkeys(found['seen']))}, expected {right}: call the model once"
            )
            words += ", under torch.autocast with dtype=dtype"
        elif found["loss"] != FLOAT32:
            words = f"the loss is in {found['loss']}: compute it in float32, from outputs.float()"
        elif not math.isfinite(found["value"]):
            words = "the loss is not finite: squares of these errors overflow in fp16; compute them in float32"
        elif not abs(found["value"] - loss.item()) <= LOOSE * loss.item():
            words = f"the loss is {found['value']:.5g}, expected {loss.item():.5g}"
        if not words:
            gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
            handed = world.handed_in(name, gradients)[0]
            off = [key for key, each in gradients.items() if not near(handed[key], each, LOOSE)]
            words = f"the gradient of {off[0]} is not that of the mean squared error" if off else ""
        if words:
            world.find(0, f"in {name}: {words}")
            return


def gradients_of(nonce: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's gradients in 16 bits: of numbers whose sum overflows, and of 256 on rank 0 and small ones elsewhere."""
    generator = torch.Generator().manual_seed(seed_of(nonce, rank) + 5)
    drawn = torch.rand(64, generator=generator)
    return {
        "fp16, large": (40000 + 20000 * drawn).half(),
        "fp16, small": ((1 + drawn.round()) * 2.0**-24).half(),
        "bf16": torch.full((64,), 256.0).bfloat16() if rank == 0 else (0.25 + drawn / 2).bfloat16(),
    }


@Claim
def averages_in_float32(on: OnLesson) -> None:
    """The average of gradients in 16 bits: added up in float32, one all-reduce each, and in float32 afterwards."""
    for name, gradient in gradients_of(on.nonce, on.rank).items():
        ledger = on.fresh_ledger()
        mean = on.student.mean_over_ranks(on.comm, gradient)
        is_tensor = isinstance(mean, torch.Tensor)
        kind = name_of(mean) if is_tensor else type(mean).__name__
        on.report(name, {"kind": kind, "calls": [row.bytes_sent for row in ledger.rows]})
        on.hand_in(name, {"mean": mean.float() if is_tensor and mean.shape == gradient.shape else None})


def total_of(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, rounded after each addition."""
    total = parts[0].clone()
    for each in parts[1:]:
        total += each
    return total


@averages_in_float32.judgement
def _(world: World) -> None:
    by_rank = [gradients_of(world.nonce, rank) for rank in range(world.size)]
    for name in by_rank[0]:
        own = torch.stack([each[name] for each in by_rank])
        right = own.float().mean(dim=0)
        rounded, divided = total_of(own), own / len(own)
        in_half = "the sum was made in 16 bits: make it float32 before the all-reduce, not after it"
        ways = (
            ("that is the average rounded to 16 bits: add up, divide and leave it in float32", right.to(own.dtype)),
            (in_half, rounded / len(own)),
            (in_half, rounded.float() / len(own)),
            (
                "each rank divides in 16 bits, where small numbers become 0: divide after the sum",
                divided.float().sum(0),
            ),
            ("that is divided and added up in 16 bits: both belong in float32", total_of(divided)),
            ("that is the sum: divide by the number of ranks", own.float().sum(dim=0)),
        )
        for rank, found in enumerate(world.handed_in(name, {"mean": right})):
            about, mean = world.reported(name, dict)[rank], found["mean"]
            words = ""
            if mean is None:
                words = f"mean_over_ranks gives {about['kind']}, expected a float32 tensor of the gradient's shape"
            elif not near(mean, right):
                why = next((f": {said}" for said, made in ways if torch.equal(mean, made.float())), "")
                words = furthest_off(mean, right) + why
            elif about["kind"] != FLOAT32:
                words = f"the average is in {about['kind']}, expected float32"
            elif len(about["calls"]) != 1:
                words = f"{len(about['calls'])} calls are made, expected one all-reduce"
            if words:
                world.find(rank, f"{name}: {words}")
                return


SCALE, PATIENCE, RATE = 65536.0, 2, 1e5
SMALL, LARGE = 1e-5, 1e6  # a loss's factor: gradients near 1e-8, and those that overflow with any scale
# The factors of a step by rank, -1 for the last; SMALL where none is given. The first good steps are so many that
# the scale doubles twice in a row.
GOOD: dict[int, float] = {}
STEPS = (
    *[GOOD] * (2 * PATIENCE + 1),
    {-1: LARGE},
    GOOD,
    GOOD,
    {0: LARGE},
    {0: LARGE},
    GOOD,
    {0: LARGE, 1: -LARGE},  # whose sum is NaN
    GOOD,
    {-1: math.nan},
    GOOD,
)
NAMES = {LARGE: "inf", -LARGE: "-inf"}  # any other factor is NaN


class InHalf(nn.Module):
    """A product in fp16 with each of two parameters in float32."""

    def __init__(self, nonce: int) -> None:
        super().__init__()
        drawn = 1 + torch.rand(2, 8, generator=torch.Generator().manual_seed(nonce))
        self.first, self.last = nn.Parameter(drawn[0].clone()), nn.Parameter(drawn[1].clone())

    def forward(self, inputs: torch.Tensor, factor: float) -> torch.Tensor:
        """(2, 8) to the sum of both products in float32, that of `first` times SMALL, that of `last` times `factor`."""
        first, last = ((each.half() * p.half()).float().sum() for each, p in zip(inputs, (self.first, self.last)))
        return first * SMALL + last * factor

    def state(self, scale: float) -> torch.Tensor:
        """Both parameters' elements and the scale, (17) in float64."""
        return torch.cat([self.first.detach(), self.last.detach(), torch.tensor([scale], dtype=torch.float64)])


def loss_at(model: nn.Module, nonce: int, rank: int, size: int, step: int) -> torch.Tensor:
    """A rank's loss in a step. In a bad step only the gradient of one of the two parameters is inf."""
    generator = torch.Generator().manual_seed(seed_of(nonce, rank) + step)
    inputs = (0.5 + torch.rand(2, 8, generator=generator)) * 1e-3
    factors = {each % size: factor for each, factor in STEPS[step].items()}
    return model(inputs, factors.get(rank, SMALL))


@dataclass(frozen=True)
class ScalerVariant:
    """A way to scale, right or wrong; `words` say what is wrong with it."""

    words: str
    scaled: bool = True
    unscaled: bool = True
    average: str = "mean"
    skips: str = "all"
    halves: bool = True
    grows: str = "in a row"
    empties: bool = True
    unscales_first: bool = False


RIGHT = ScalerVariant("")
ON_ITS_OWN = "only the rank whose gradient was inf leaves out the step: ask after the average"
MISTAKES = (
    ScalerVariant(
        "small gradients became 0: backward multiplies the loss by the scale, and .grad is divided by it in float32",
        scaled=False,
    ),
    ScalerVariant("the gradients are still scaled: divide them by the scale before the step", unscaled=False),
    ScalerVariant("the gradients are those of one rank: average them over the ranks", average="own"),
    ScalerVariant("the gradients are the sum over the ranks: divide by their number", average="sum"),
    ScalerVariant("the step is made although a gradient is inf: leave it out", skips="never"),
    ScalerVariant("the step is made although a gradient is NaN: ask isfinite(), as inf - inf is NaN", skips="inf"),
    ScalerVariant("the step is made although a gradient is inf: ask isfinite(), not only for NaN", skips="nan"),
    ScalerVariant("only the parameter whose gradient is inf is left out: leave out the step of all", skips="each"),
    ScalerVariant("inf was replaced and the step was made: leave out the whole step", skips="replaces"),
    ScalerVariant(ON_ITS_OWN, skips="own"),
    ScalerVariant(ON_ITS_OWN, skips="own", unscales_first=True),
    ScalerVariant("the scale is not halved after a step that is left out", halves=False),
    ScalerVariant("the scale never grows: double it after `patience` good steps in a row", grows="never"),
    ScalerVariant("the scale grows after each good step: wait for `patience` of them in a row", grows="always"),
    ScalerVariant("good steps are counted from the start: a step that is left out sets them to 0", grows="in all"),
    ScalerVariant("after it has doubled, the scale grows in each step: count from 0 again", grows="from then on"),
    ScalerVariant("the scale doubles only once in a row of good steps: count from 0 again", grows="once"),
    ScalerVariant(
        "the scale doubles one step late: with the step that makes `patience` good ones in a row", grows="late"
    ),
    ScalerVariant("the gradients of the step before are added: set .grad to None", empties=False),
)


def simulate(nonce: int, size: int, way: ScalerVariant) -> torch.Tensor:
    """What `InHalf.state` is after each step: (steps, ranks, 17)."""
    models = [InHalf(nonce) for _ in range(size)]
    scales, counts, found = [SCALE] * size, [0] * size, []
    for step in range(len(STEPS)):
        for rank, model in enumerate(models):
            (loss_at(model, nonce, rank, size, step) * (scales[rank] if way.scaled else 1.0)).backward()
        own = [torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in m.parameters()]) for m in models]
        if way.skips == "replaces":
            own = [each.nan_to_num(0.0, 0.0, 0.0) for each in own]
        if way.unscales_first:  # which differs only if the ranks' scales do
            own = [each / scale for each, scale in zip(own, scales, strict=True)]
        total = torch.stack(own).sum(dim=0)
        for rank, model in enumerate(models):
            mean = {"mean": total / size, "sum": total, "own": own[rank]}[way.average]
            if way.unscaled and not way.unscales_first:
                mean = mean / scales[rank]
            is_bad = BAD.get(way.skips, lambda gradient: ~gradient.isfinite())
            is_good = not bool(is_bad(own[rank] if way.skips == "own" else mean).any())
            taken = mean.isfinite() if way.skips == "each" else torch.tensor(is_good)
            step_by = torch.where(taken, RATE * mean, 0.0)
            for p, part, kept in zip(model.parameters(), step_by.split(8), mean.split(8), strict=True):
                p.data -= part
                p.grad = None if way.empties else kept.clone()
            if is_good:
                counts[rank] += 1
            else:
                counts[rank] = counts[rank] if way.grows == "in all" else 0
                scales[rank] /= 2 if way.halves else 1
            if is_good and GROWS.get(way.grows, lambda count: count >= PATIENCE)(counts[rank]):
                scales[rank] *= 2
                counts[rank] = counts[rank] if way.grows in ("from then on", "once") else 0
        found.append(torch.stack([model.state(scale) for model, scale in zip(models, scales, strict=True)]))
    return torch.stack(found)


# What a step is left out for, where it is not for what is not finite.
BAD = {"never": torch.zeros_like, "inf": torch.isinf, "nan": torch.isnan}
# After how many good steps the scale grows, where it is not after PATIENCE or more.
GROWS = {
    "always": lambda count: True,
    "never": lambda count: False,
    "once": lambda count: count == PATIENCE,
    "late": lambda count: count > PATIENCE,
}


def alike(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Whether states of (steps, ranks, 17) are equal up to rounding, or both not finite, by step and rank."""
    one, other = (each.where(each.isfinite(), math.nan) for each in (found, right))
    return torch.isclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True).all(dim=-1)


@Claim
def steps_together(on: OnLesson) -> None:
    """Small gradients survive; a step with an inf on any rank is left out on all; the scale follows its rule."""
    model = InHalf(on.nonce)
    scaler = on.student.LossScaler(on.comm, list(model.parameters()), RATE, SCALE, PATIENCE)
    for step in range(len(STEPS)):
        scaler.backward(loss_at(model, on.nonce, on.rank, on.world_size, step))
        scaler.step()
        on.hand_in(f"step {step + 1}", {"state": model.state(float(scaler.scale))})


@steps_together.judgement
def _(world: World) -> None:
    like = {"state": torch.zeros(17, dtype=torch.float64)}
    by_step = [[each["state"] for each in world.handed_in(f"step {n + 1}", like)] for n in range(len(STEPS))]
    found = torch.stack([torch.stack([each for each in ranks if each is not None]) for ranks in by_step])
    right = simulate(world.nonce, world.size, RIGHT)
    if alike(found, right).all():
        return
    step, rank = (~alike(found, right)).nonzero()[0].tolist()
    bad = [f"rank {each % world.size} has {NAMES.get(factor, 'NaN')}" for each, factor in STEPS[step].items()]
    what = f"in which {' and '.join(bad)}" if bad else "in which all gradients are finite"
    where = f"after step {step + 1}, {what}, rank {rank}"
    (*weights, scale), (*right_weights, right_scale) = found[step, rank].tolist(), right[step, rank].tolist()
    words = f"the scale is {scale:g}, expected {right_scale:g}"
    if scale == right_scale:
        words = f"element 0 of the weight is {weights[0]:.7g}, expected {right_weights[0]:.7g}"
    words = next((way.words for way in MISTAKES if alike(found, simulate(world.nonce, world.size, way)).all()), words)
    world.find(rank, f"{where}: {words}", at="LossScaler.step")


@Claim
def record(on: OnLesson) -> None:
    """How large the gradients of a small network are in fp16, with a scale and without."""
    found = {}
    for scale in (1.0, SCALE):
        model = seeded(on.nonce, TwoLinear)
        inputs, targets = batch(on.nonce)
        loss = on.student.loss_of(model, inputs, targets - 400, torch.float16) * SMALL / 100
        (loss * scale).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        powers = (gradients.abs().log2() + 30).clamp(0).nan_to_num(0.0).long().clamp(max=50)
        counts = torch.bincount(powers, minlength=51) * 100 / len(powers)
        found[f"scale {scale:g}"] = [(float(power), share) for power, share in enumerate(counts.tolist())]
    words = {"x": "powers of 2, from 2^-30 to 2^20; the least is 0", "y": "% of the gradient's elements"}
    on.report("curves", words | {"lines": found})


CHECKS = Checks(
    (
        Check(computes_in_16_bits, (2,), about="loss_of"),
        Check(averages_in_float32, (2, 3), about="mean_over_ranks"),
        Check(steps_together, (2, 3), about="LossScaler"),
    ),
    record=record,
)
