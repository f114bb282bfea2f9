"""Models, gradients and steps from a seed: tensors of any size, dtype and layout, with exact gradients.

The loss is the sum of each tensor times random numbers, so these numbers are its gradient, to the last bit. The right
results follow from them in float64. How far a correct sum may be off follows from dtype and number of terms.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

MOST_PARTS, STEPS = 4, 37
Gradients = dict[str, torch.Tensor]
Right = tuple[list[dict[str, torch.Tensor | None]], Gradients]


@dataclass(frozen=True)
class Drawn:
    """One tensor. `is_strided`: its last two dimensions are exchanged in memory, so that it is not contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_strided: bool = False

    def values(self, generator: torch.Generator) -> torch.Tensor:
        """Numbers between -1 and 1 in its shape, dtype and layout."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        shape = (*self.shape[:-2], *self.shape[:-3:-1]) if self.is_strided else self.shape
        values = torch.empty(shape, dtype=wide).uniform_(-1, 1, generator=generator).to(self.dtype)
        return values.transpose(-1, -2) if self.is_strided else values


@dataclass(frozen=True)
class DrawnStep:
    """One step: its backward passes, and their surroundings.

    within: whether all passes except the last are within no_sync. scale: of the loss. infinite: the rank whose gradient
    has a non-finite number, or -1. zeroes: whether the previous step ends with zero_grad(set_to_none=False).
    """

    number: int
    parts: int = 1
    within: bool = True
    scale: float = 1.0
    infinite: int = -1
    zeroes: bool = False

    def words(self) -> str:
        """Its description."""
        passes = f", {self.parts} backward passes {'within' if self.within else 'without'} no_sync"
        return f"step {self.number + 1}{passes if self.parts > 1 else ''}"


class DrawnModel(nn.Module):
    """Has the drawn tensors as parameters; `forward` takes the gradient of each that it uses, by name."""

    def __init__(self, tensors: Sequence[Drawn], seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for each in tensors:
            self.register_parameter(each.name, nn.Parameter(each.values(generator)))

    def forward(self, **gradients: torch.Tensor) -> torch.Tensor:
        """The loss with these gradients."""
        parts = [(getattr(self, name) * gradient).sum().double() for name, gradient in gradients.items()]
        return torch.stack(parts).sum()


@dataclass(frozen=True)
class Draw:
    """A drawn model and its steps. `label` identifies it within a check. `sizes`: the exponents of 2 of gradients.

    may_refuse: whether a sync may raise an exception on every rank instead of averaging such tensors. may_be_unused:
    whether a step may leave a tensor out on some ranks, or on all.
    """

    seed: int
    label: str
    ranks: int
    tensors: tuple[Drawn, ...]
    steps: tuple[DrawnStep, ...]
    sizes: tuple[int, int] = (-12, 3)
    may_refuse: bool = False
    may_be_unused: bool = False

    def model(self, rank: int = 0) -> DrawnModel:
        """A rank's model before it is wrapped."""
        return DrawnModel(self.tensors, _seed(self.seed, self.label, rank))

    def gradients(self, step: DrawnStep, part: int, rank: int) -> Gradients:
        """The gradients of a rank's backward pass, for the tensors that it uses there, without the scale."""
        common = _random(self.seed, self.label, step.number)
        own = torch.Generator().manual_seed(_seed(self.seed, self.label, step.number, part, rank))
        found = {}
        for place, each in enumerate(self.tensors):
            kind, users, one = common.random(), common.random(self.ranks) < 0.6, int(common.integers(self.ranks))
            elements = int(np.prod(each.shape))
            size, where = float(2.0 ** common.integers(*self.sizes)), int(common.integers(max(1, elements)))
            nowhere, at = common.random() < 0.2, np.unravel_index(where, each.shape) if each.shape else ()
            values = each.values(own).mul_(size)
            if step.number and (kind < 0.1 or (kind < 0.2 and rank != one)):
                values.zero_()  # of all ranks, or of all except one; in the first step every element counts
            if step.infinite == rank and place == step.number % len(self.tensors):
                values[at] = (float("nan"), float("inf"), -float("inf"))[step.number % 3]
            if not (self.may_be_unused and place and (nowhere or not users[rank])):
                found[each.name] = values
        return found

    @functools.lru_cache(maxsize=100)  # noqa: B019 - draws are few, and live as long as the check
    def right(self, step: DrawnStep) -> Right:
        """Every rank's own gradients, summed over its passes, in float64; and by element how far a correct mean may be
        off: half an eps per rounding of what is added."""
        by_rank: list[dict[str, torch.Tensor | None]] = []
        bounds = {each.name: torch.zeros(each.shape, dtype=torch.float64) for each in self.tensors}
        for rank in range(self.ranks):
            sums: dict[str, torch.Tensor | None] = {each.name: None for each in self.tensors}
            for part in range(step.parts):
                for name, values in self.gradients(step, part, rank).items():
                    term, before = values.double() * step.scale, sums[name]
                    sums[name] = term if before is None else before + term
                    bounds[name] += term.abs()
            by_rank.append(sums)
        roundings = 2 * (self.ranks + step.parts * (1 if step.within else self.ranks) + 2)
        for each in self.tensors:
            kind, total = torch.finfo(each.dtype), bounds[each.name]
            bounds[each.name] = roundings * (kind.eps / 2 * total / self.ranks + kind.smallest_normal * kind.eps)
        return by_rank, bounds


@functools.lru_cache(maxsize=8)
def models(seed: int, ranks: int) -> tuple[Draw, ...]:
    """Models of tensors of every size: mixed, long ones, cut at round numbers, of half precision, not contiguous."""
    random = _random(seed, "models", ranks)
    shapes = [(), (1,), (max(1, ranks - 1),), (ranks,), (1, ranks + 1), (2 * ranks + 1, 1)]
    shapes += [_shape_of(int(2 ** random.uniform(0, 14)), random) for _ in range(6)]
    kinds = [torch.float64 if random.random() < 0.3 else torch.float32 for _ in shapes]
    kinds[int(random.integers(len(shapes)))] = torch.float64
    long = [(int(random.integers(1_050_000, 1_300_000)),), (), _shape_of(int(random.integers(70_000, 200_000)), random)]
    powers = [512, 512, *(2**k for k in range(10, 17)), *(2**k for k in range(16, 9, -1)), 512, 512]
    halves = [(), (3,), _shape_of(int(random.integers(1_000, 9_000)), random), (int(random.integers(66_000, 99_000)),)]
    strided = [(int(random.integers(2, 40)), 7), (3, 5, int(random.integers(2, 30))), (64, 65)]
    steps = tuple(DrawnStep(number, parts=1 + number % 2) for number in range(4))

    def draw(label: str, tensors: tuple[Drawn, ...], count: int) -> Draw:
        return Draw(seed, label, ranks, tensors, steps[:count])

    odd = tuple(Drawn(f"t{place}", shape, is_strided=True) for place, shape in enumerate(strided))
    dtypes = [torch.float16, torch.bfloat16] * 4
    return (
        replace(draw("tensors of any size", _named(shapes, kinds, random), 4), sizes=(-40, 40), may_be_unused=True),
        draw("long tensors", _named(long, [torch.float32, torch.float32, torch.float64], random), 1),
        draw("sizes of powers of 2", _named([(n,) for n in powers], [torch.float32] * len(powers), None), 2),
        replace(draw("half precision", _named(halves * 2, sorted(dtypes, key=str), random), 2), may_refuse=True),
        replace(draw("tensors that are not contiguous", odd, 2), may_refuse=True),
    )


@functools.lru_cache(maxsize=8)
def training(seed: int, ranks: int, label: str, count: int = STEPS) -> Draw:
    """Steps of a small model: 1 to 4 backward passes each, within no_sync and without, under several scales."""
    random = _random(seed, f"training {label}", ranks)
    shapes = [(), (1,), (3,), (int(random.integers(900, 1_500)),), _shape_of(int(random.integers(90, 400)), random)]
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float32]
    # Every number of passes occurs with no_sync and without it, several times, in random order.
    passes = [(parts, within) for parts in range(1, MOST_PARTS + 1) for within in (True, False)]
    steps = []
    for number in range(count):
        if number % len(passes) == 0:
            random.shuffle(passes)
        parts, within = passes[number % len(passes)]
        scale = 1.0 if random.random() < 0.5 else float(2.0 ** random.choice([-2, 3, 10, 16]))
        steps.append(DrawnStep(number, parts, within, scale, zeroes=number % 3 == 2))
    return Draw(seed, label, ranks, _named(shapes, kinds, random), tuple(steps))


def many_steps(seed: int, ranks: int) -> tuple[Draw, Draw]:
    """Steps that use all tensors, and steps that leave some out."""
    other = training(seed, ranks, "many steps that leave tensors out")
    plain = tuple(replace(step, within=True, zeroes=False) for step in other.steps)
    return training(seed, ranks, "many steps"), replace(other, steps=plain, may_be_unused=True)


def overflowing(seed: int, ranks: int) -> Draw:
    """Ten steps, in three to five of which one rank's gradient is not finite."""
    draw, random = training(seed, ranks, "steps that overflow", 10), _random(seed, "overflow", ranks)
    odd = {int(number): int(random.integers(ranks)) for number in random.permutation(9)[: random.integers(3, 6)]}
    odd[3] = ranks - 1
    steps = (replace(step, infinite=odd.get(step.number, -1), zeroes=False) for step in draw.steps)
    return replace(draw, steps=tuple(steps))


def _random(seed: int, label: str, *numbers: int) -> np.random.Generator:
    """The random numbers of that name, the same on every rank and in the judge."""
    return np.random.default_rng([seed, zlib.crc32(label.encode()), *numbers])


def _seed(seed: int, label: str, *numbers: int) -> int:
    return int(_random(seed, label, 1 << 20, *numbers).integers(1 << 62))


def _shape_of(elements: int, random: np.random.Generator) -> tuple[int, ...]:
    """A shape of one to four dimensions with `elements` elements or a few less."""
    shape = []
    for _ in range(int(random.integers(0, 4))):
        side = int(random.integers(1, 9))
        if elements >= 2 * side:
            shape.append(side)
            elements //= side
    return (*shape, elements)


def _named(
    shapes: Sequence[tuple[int, ...]], kinds: Sequence[torch.dtype], random: np.random.Generator | None
) -> tuple[Drawn, ...]:
    """Tensors of these shapes, in random order if `random` is given."""
    order = range(len(shapes)) if random is None else random.permutation(len(shapes))
    return tuple(Drawn(f"t{place}", shapes[which], kinds[which]) for place, which in enumerate(order))
