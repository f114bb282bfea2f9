"""Models, gradients and steps from a trial's nonce: tensors of any size, dtype and layout, with exact gradients.

The loss is the sum of each tensor times random numbers, so these numbers are its gradient, to the last bit. The right
results follow from them in float64. How far a correct sum may be off follows from dtype and number of terms.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from cos598d.tools.check.comparison import Comparison, Gradients, Local

HALVES = (torch.float16, torch.bfloat16)
MOST_PARTS, MOST_STEPS = 4, 40


@dataclass(frozen=True)
class Drawn:
    """One tensor. `is_strided`: its last two dimensions are exchanged in memory, so that it is not contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_strided: bool = False

    @property
    def elements(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    def values(self, generator: torch.Generator) -> torch.Tensor:
        """Numbers between -1 and 1 in its shape, dtype and layout."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        shape = (*self.shape[:-2], *self.shape[:-3:-1]) if self.is_strided else self.shape
        values = torch.empty(shape, dtype=wide).uniform_(-1, 1, generator=generator).to(self.dtype)
        return values.transpose(-1, -2) if self.is_strided else values


@dataclass(frozen=True)
class DrawnStep:
    """One step: its backward passes, and their surroundings.

    within: whether all passes except the last are within no_sync. breaks_off: whether before them a forward within
        no_sync ends in an exception, which the script catches. loads: whether a new sync with the old one's state
        replaces it before the step. infinite: the rank whose gradient has a non-finite number, or -1.
    zeroes: whether the previous step ends with zero_grad(set_to_none=False), so that gradients are added to zeros.
    """

    number: int
    parts: int = 1
    within: bool = True
    loss_scale: float = 1.0
    breaks_off: bool = False
    loads: bool = False
    infinite: int = -1
    zeroes: bool = False

    def facts(self) -> dict[str, bool]:
        """What may distinguish it from other steps, in the report's words."""
        around = "within no_sync" if self.within else "without no_sync"
        return {
            f"with {self.parts} backward passes{f' {around}' if self.parts > 1 else ''}": True,
            f"with {self.parts} backward passes": True,
            "with more than one backward pass": self.parts > 1,
            "with more than two backward passes": self.parts > 2,
            "with backward passes within no_sync": self.parts > 1 and self.within,
            "with several backward passes without no_sync": self.parts > 1 and not self.within,
            "where loss_scale is not 1": self.loss_scale != 1,
            f"where loss_scale is {self.loss_scale:g}": True,
            "after an exception within no_sync": self.breaks_off,
            "after zero_grad(set_to_none=False)": self.zeroes,
        }


class DrawnModel(nn.Module):
    """Has the drawn tensors as parameters; `forward` takes the gradient of each that it uses, by name."""

    def __init__(self, tensors: Sequence[Drawn], seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for each in tensors:
            self.register_parameter(each.name, nn.Parameter(each.values(generator)))

    def forward(self, **gradients: torch.Tensor) -> tuple[torch.Tensor]:
        """The loss with these gradients."""
        parts = [(getattr(self, name) * gradient).sum().double() for name, gradient in gradients.items()]
        return (torch.stack(parts).sum(),)


@dataclass(frozen=True)
class Draw:
    """A drawn model and its steps. `label` identifies it within a trial. `sizes`: the exponents of 2 of gradients.

    `may_refuse`: whether a sync may raise an exception on every rank instead of averaging such tensors, which the
    training loop never has. `may_be_unused`: whether a step may leave a tensor out on some ranks, or on all.
    """

    nonce: int
    label: str
    ranks: int
    tensors: Sequence[Drawn]
    steps: Sequence[DrawnStep]
    sizes: tuple[int, int] = (-12, 3)
    may_refuse: bool = False
    may_be_unused: bool = False

    def model(self, rank: int = 0) -> DrawnModel:
        """A rank's model before it is attached."""
        return DrawnModel(self.tensors, _seed(self.nonce, self.label, rank))

    def gradients(self, step: DrawnStep, part: int, rank: int) -> dict[str, torch.Tensor]:
        """The gradients of a rank's backward pass, for the tensors that it uses there, without the scale."""
        common = random_of(self.nonce, self.label, step.number)
        own = torch.Generator().manual_seed(_seed(self.nonce, self.label, step.number, part, rank))
        found = {}
        for place, each in enumerate(self.tensors):
            kind, users, one = common.random(), common.random(self.ranks) < 0.6, int(common.integers(self.ranks))
            size, where = float(2.0 ** common.integers(*self.sizes)), int(common.integers(max(1, each.elements)))
            nowhere = common.random() < 0.2
            values = each.values(own).mul_(size)
            if step.number == 0:
                pass  # so that every element of every tensor is tested once
            elif kind < 0.1 or (kind < 0.2 and rank != one):
                values.zero_()  # of all ranks, or of all except one
            elif kind < 0.25:
                values.zero_()
                values[np.unravel_index(where, each.shape) if each.shape else ()] = size
            if step.infinite == rank and place == step.number % len(self.tensors):
                values[np.unravel_index(where, each.shape) if each.shape else ()] = (
                    float("nan") if step.number % 3 == 0 else float("inf") * (1 if step.number % 3 == 1 else -1)
                )
            if self.may_be_unused and place and (nowhere or not users[rank]):
                continue
            found[each.name] = values
        return found

    def comparison(self, step: DrawnStep, found: Sequence[Gradients]) -> "DrawnComparison":
        """The gradients after the step's `finish`, next to the mean in float64 and its error bounds."""
        parts = []
        for part in range(step.parts):
            of_ranks = []
            for rank in range(self.ranks):
                own = self.gradients(step, part, rank)
                of_ranks.append(
                    {e.name: own[e.name].double() * step.loss_scale if e.name in own else None for e in self.tensors}
                )
            parts.append(of_ranks)
        local = Local(parts)
        bounds = {}
        for each in self.tensors:
            terms = [ranks[each.name] for part in parts for ranks in part]
            total = torch.zeros(each.shape, dtype=torch.float64)
            for term in terms:
                if term is not None:
                    total += term.abs()
            kind = torch.finfo(each.dtype)
            roundings = 2 * (self.ranks + step.parts * (1 if step.within else self.ranks) + 2)
            # Half an eps per rounding, each relative to at most the sum of what is added.
            bounds[each.name] = roundings * (kind.eps / 2 * total / self.ranks + kind.smallest_normal * kind.eps)
        facts = step.facts() | {"after load_own_state": any(each.loads for each in self.steps[: step.number + 1])}
        return DrawnComparison(self.label, step.number, local, found, local.mean, facts, bounds)

    def words(self, step: DrawnStep) -> str:
        """The step's description, so that you can repeat it."""
        parts = f", {step.parts} backward passes {'within' if step.within else 'without'} no_sync"
        scale = f", loss_scale {step.loss_scale:g}" if step.loss_scale != 1 else ""
        of = f"step {step.number + 1} of {len(self.steps)}" if len(self.steps) > 1 else "one step"
        return f"{self.label}, {of}{parts if step.parts > 1 else ''}{scale}"


@dataclass(frozen=True)
class DrawnComparison(Comparison):
    """Compared with `bounds`, element by element."""

    bounds: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def off(self, rank: int, name: str) -> torch.Tensor:
        """Where the right number is not finite, any non-finite one is right. Elsewhere in such a step any number is,
        since it is dropped."""
        found, right = self.pair(rank, name)
        is_right = torch.where(right.isfinite(), (found - right).abs() <= self.bounds[name], ~found.isfinite())
        if self._is_dropped:
            is_right |= ~found.isfinite()
        return ~is_right.flatten()

    @functools.cached_property
    def _is_dropped(self) -> bool:
        """Whether a right number is not finite, so that no rank makes the step."""
        return any(not tensor.isfinite().all() for tensor in self.right.values() if tensor is not None)

    def words(self, rank: int, name: str) -> str:
        """What is wrong with a tensor on a rank: the element with the largest error, expected and found."""
        found, right = self.found[rank][name], self.right[name]
        if found is None or right is None:
            should, has = (f"{'None' if gradient is None else 'a gradient'}" for gradient in (right, found))
            return f"{name}'s .grad: expected {should}, got {has}"
        like = f"{'x'.join(map(str, found.shape)) or 'no dimension'}, {str(found.dtype)[6:]}"
        found, right = self.pair(rank, name)
        off = self.off(rank, name)
        error = torch.where(off, (found - right).abs().flatten() / self.bounds[name].flatten(), 0.0)
        place = int(error.nan_to_num(float("inf"), float("inf")).argmax())
        pair = [float(each.flatten()[place]) for each in (right, found)]
        digits = 9 if abs(pair[0] - pair[1]) < 1e-4 * abs(pair[0]) else 4
        expected, got = (f"{number:.{17 if digits == 9 and 'float64' in like else digits}g}" for number in pair)
        return f"{name} ({like}), element {place} of {len(off)}: expected the mean {expected}, got {got}"

    def drift(self) -> tuple[float, float, float]:
        """For the float32 tensors of all ranks: the sum of their errors away from 0, the sum of their errors, and the
        sum of the right values' sizes."""
        sums = [0.0, 0.0, 0.0]
        for rank, gradients in enumerate(self.found):
            for name, tensor in gradients.items():
                if tensor is not None and tensor.dtype == torch.float32 and self.right[name] is not None:
                    found, right = self.pair(rank, name)
                    for place, each in enumerate(((found - right) * right.sign(), found - right, right.abs())):
                        sums[place] += float(each.sum())
        return sums[0], sums[1], sums[2]


def random_of(nonce: int, label: str, *numbers: int) -> np.random.Generator:
    """The random numbers of that name, the same on every rank and in the judge."""
    return np.random.default_rng([nonce, zlib.crc32(label.encode()), *numbers])


def _seed(nonce: int, label: str, *numbers: int) -> int:
    return int(random_of(nonce, label, 1 << 20, *numbers).integers(1 << 62))


def _shape_of(elements: int, random: np.random.Generator) -> tuple[int, ...]:
    """A shape of one to four dimensions with `elements` elements or a few less."""
    shape = []
    for _ in range(int(random.integers(0, 4))):
        side = int(random.integers(1, 9))
        if elements >= 2 * side:
            shape.append(side)
            elements //= side
    return (*shape, elements)


@functools.lru_cache(maxsize=8)
def models(nonce: int, ranks: int) -> tuple[Draw, ...]:
    """Models of tensors of every size: mixed, long ones, cut at round numbers, of half precision, not contiguous."""
    random = random_of(nonce, "models", ranks)
    around = [(), (1,), (max(1, ranks - 1),), (ranks,), (1, ranks + 1), (2 * ranks + 1, 1)]
    sizes = [_shape_of(int(2 ** random.uniform(0, 14)), random) for _ in range(6)]
    shapes = [*around, *sizes]
    kinds = [torch.float64 if random.random() < 0.3 else torch.float32 for _ in shapes]
    kinds[int(random.integers(len(shapes)))] = torch.float64
    mixed = _named(shapes, kinds, random)
    long = [(int(random.integers(1_050_000, 3_000_000)),), (), _shape_of(int(random.integers(70_000, 200_000)), random)]
    powers = [512, 512, *(2**k for k in range(10, 17)), *(2**k for k in range(16, 9, -1)), 512, 512]
    tens = [1_000, 9_000, 90_000, 90_000, 9_000, 1_000]
    halves = [(), (3,), _shape_of(int(random.integers(1_000, 9_000)), random), (int(random.integers(66_000, 99_000)),)]
    steps = [DrawnStep(number, parts=1 + number % 2) for number in range(4)]

    def draw(label: str, tensors: Sequence[Drawn], count: int, **facts: object) -> Draw:
        return Draw(nonce, label, ranks, tensors, steps[:count], **facts)  # type: ignore[arg-type]

    plain = [torch.float32] * len(powers)
    strided = [
        Drawn(f"t{place}", shape, is_strided=True)
        for place, shape in enumerate([(int(random.integers(2, 40)), 7), (3, 5, int(random.integers(2, 30))), (64, 65)])
    ]
    return (
        draw("tensors of any size", mixed, 4, sizes=(-40, 40), may_be_unused=True),
        draw("long tensors", _named(long, [torch.float32, torch.float32, torch.float64], random), 1),
        draw("sizes of powers of 2", _named([(n,) for n in powers], plain, None), 2),
        draw("sizes of powers of 10", _named([(n,) for n in tens], plain, None), 2),
        *(
            draw(f"{str(kind)[6:]} tensors", _named(halves, [kind] * 3 + [torch.float32], random), 2, may_refuse=True)
            for kind in HALVES
        ),
        draw("tensors that are not contiguous", strided, 2, may_refuse=True),
    )


@functools.lru_cache(maxsize=8)
def training(nonce: int, ranks: int, label: str = "", least: int = 33, most: int = MOST_STEPS) -> Draw:
    """Many steps of a small model: 1 to 4 backward passes each, within no_sync and without, under several scales."""
    random = random_of(nonce, f"training {label}", ranks)
    shapes = [(), (1,), (3,), (int(random.integers(900, 1_500)),), _shape_of(int(random.integers(90, 400)), random)]
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float32]
    count = int(random.integers(least, most + 1))
    # Every number of passes occurs with no_sync and without it, several times, in random order.
    passes = [(parts, within) for parts in range(1, MOST_PARTS + 1) for within in (True, False)]
    steps = []
    for number in range(count):
        if number % len(passes) == 0:
            random.shuffle(passes)
        parts, within = passes[number % len(passes)]
        scale = 1.0 if random.random() < 0.5 else float(2.0 ** random.choice([-2, 3, 10, 16]))
        steps.append(DrawnStep(number, parts, within, scale, breaks_off=number > 2 and random.random() < 0.1))
    return Draw(nonce, label or "many steps", ranks, _named(shapes, kinds, random), steps)


def _named(
    shapes: Sequence[tuple[int, ...]], kinds: Sequence[torch.dtype], random: np.random.Generator | None
) -> tuple[Drawn, ...]:
    """Tensors of these shapes, in random order if `random` is given."""
    order = range(len(shapes)) if random is None else random.permutation(len(shapes))
    return tuple(Drawn(f"t{place}", shapes[which], kinds[which]) for place, which in enumerate(order))
