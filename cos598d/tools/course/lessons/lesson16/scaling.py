"""Lesson 16: losses in fp16, and a loss scale over ranks, simulated in one process, rightly or with a mistake."""

import math
from dataclasses import dataclass

import torch
from torch import nn

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


class InHalf(nn.Module):
    """A product in fp16 with each of two parameters in float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = 1 + torch.rand(2, 8, generator=torch.Generator().manual_seed(seed))
        self.first, self.last = nn.Parameter(drawn[0].clone()), nn.Parameter(drawn[1].clone())

    def forward(self, inputs: torch.Tensor, factor: float) -> torch.Tensor:
        """(2, 8) to the sum of both products in float32, that of `first` times SMALL, that of `last` times `factor`."""
        first, last = ((each.half() * p.half()).float().sum() for each, p in zip(inputs, (self.first, self.last)))
        return first * SMALL + last * factor

    def state(self, scale: float) -> torch.Tensor:
        """Both parameters' elements and the scale, (17) in float64."""
        return torch.cat([self.first.detach(), self.last.detach(), torch.tensor([scale], dtype=torch.float64)])


def loss_at(model: nn.Module, seed: int, rank: int, size: int, step: int) -> torch.Tensor:
    """A rank's loss in a step. In a bad step only the gradient of one of the two parameters is inf."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * (rank + 1) + step)
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


def simulate(seed: int, size: int, way: ScalerVariant = RIGHT) -> torch.Tensor:
    """What `InHalf.state` is after each step: (steps, ranks, 17)."""
    models = [InHalf(seed) for _ in range(size)]
    scales, counts, found = [SCALE] * size, [0] * size, []
    for step in range(len(STEPS)):
        for rank, model in enumerate(models):
            (loss_at(model, seed, rank, size, step) * (scales[rank] if way.scaled else 1.0)).backward()
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
