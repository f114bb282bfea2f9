"""Lesson 10, second part: the largest elements travel, and what is held back comes later."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.check.toy import seeded
from cos598d.tools.learn.checking import OnLesson
from cos598d.tools.learn.lessons.common import NEAR, add_flat, furthest_off, mean_loss
from cos598d.tools.learn.lessons.lesson10.top_k_ways import MISTAKES, RIGHT, Simulation, TopKVariant, count_of

ELEMENTS, SHARE = 254, 1 / 8  # 31 elements and three quarters
ODD_SIZES = (5, 40_001)  # of the one less than an element would travel; the other has more places than 16 bits tell
NAMES = ("embedding", "output")
WITH_GRADIENTS, STEPS = 2, 10  # in the other steps gradients are zero, until all that was held back has come
TRAINED_STEPS, TRAINED_SHARE, RATE = 40, 1 / 16, 0.3
BAND = 0.5  # of what leaving error feedback out costs


@Claim
def feeds_back(on: OnLesson) -> None:
    """Each step gives the average of every rank's largest elements; what is held back is sent later, and only once."""
    codec = on.student.TopK(on.comm, SHARE)
    for step in range(STEPS):
        for name in NAMES:
            gradient = step_gradient(on.nonce, step, name, on.rank)
            codec.average(name, gradient)
            on.hand_in(moment(name, step), {"gradient": gradient})


@Claim
def takes_any_size(on: OnLesson) -> None:
    """Of 5 elements one is sent; of 40,001 elements 5,000 are, whose places need more than 16 bits."""
    for elements in ODD_SIZES:
        gradient = _odd_gradient(on.nonce, elements, on.rank)
        on.student.TopK(on.comm, SHARE).average("any", gradient)
        on.hand_in(_odd(elements), {"gradient": gradient})


@takes_any_size.judgement
def _(world: World) -> None:
    for elements in ODD_SIZES:
        own = [_odd_gradient(world.nonce, elements, rank) for rank in range(world.size)]
        right = Simulation(SHARE, RIGHT).average("any", own)[0]
        for rank, each in enumerate(world.handed_in(_odd(elements), {"gradient": right})):
            found = each["gradient"]
            if found is None or not near(found, right):
                world.find(rank, f"{_odd(elements)} on rank {rank}: {_why_odd(found, right, own, rank)}")
                return


def _why_odd(found: torch.Tensor | None, right: torch.Tensor, own: Sequence[torch.Tensor], rank: int) -> str:
    if found is None:
        return "the gradient is missing"
    for way in MISTAKES:
        if near(found, Simulation(SHARE, way).average("any", own)[rank]):
            return way.words
    if len(right) > 1 << 15 and not found[1 << 15 :].any():
        return "nothing arrives at places above 32,767: send a place as int32, since it does not fit into 16 bits"
    return f"the average is wrong; send the {count_of(SHARE, len(right), RIGHT):,} largest of each rank's elements"


def _odd(elements: int) -> str:
    return f"a tensor of {elements:,} elements"


def _odd_gradient(nonce: int, elements: int, rank: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed_of(nonce, rank) + elements))


@Claim
def sends_the_largest(on: OnLesson) -> None:
    """A rank sends at most (n-1) 8 k bytes for a tensor: a value and a place for each of its k largest elements."""
    codec = on.student.TopK(on.comm, SHARE)
    for step in range(2):
        for name in NAMES:
            gradient, ledger = step_gradient(on.nonce, step, name, on.rank), on.fresh_ledger()
            codec.average(name, gradient)
            on.report(moment(name, step), sum(row.bytes_sent for row in ledger.rows))


def moment(name: str, step: int) -> str:
    """What a step of a tensor is called."""
    return f"step {step + 1} of {name}"


def step_gradient(nonce: int, step: int, name: str, rank: int) -> torch.Tensor:
    """A rank's gradient in a step, (ELEMENTS,): zero after the first few."""
    if step >= WITH_GRADIENTS:
        return torch.zeros(ELEMENTS)
    generator = torch.Generator().manual_seed(seed_of(nonce, rank) + 100 * step + 10 * NAMES.index(name))
    return torch.randn(ELEMENTS, generator=generator)


def simulate(
    gradients: Sequence[Sequence[Sequence[torch.Tensor]]], way: TopKVariant, rank: int
) -> list[list[torch.Tensor]]:
    """What `average` makes of gradients [step][name][rank] on one rank: results [step][name]."""
    simulation = Simulation(SHARE, way)
    return [[simulation.average(*each)[rank] for each in zip(NAMES, step, strict=True)] for step in gradients]


@feeds_back.judgement
def _(world: World) -> None:
    gradients = [
        [[step_gradient(world.nonce, step, name, rank) for rank in range(world.size)] for name in NAMES]
        for step in range(STEPS)
    ]
    found = [
        [
            [each["gradient"] for each in world.handed_in(moment(name, step), {"gradient": gradients[0][0][0]})]
            for name in NAMES
        ]
        for step in range(STEPS)
    ]
    for rank in range(world.size):
        words = wrong_steps([[names[place][rank] for place in range(len(NAMES))] for names in found], gradients, rank)
        world.require(not words, words, rank)


def wrong_steps(
    found: Sequence[Sequence[torch.Tensor | None]], gradients: Sequence[Sequence[Sequence[torch.Tensor]]], rank: int
) -> str:
    """What is wrong with a rank's results [step][name], in words; "" if nothing is."""
    right = simulate(gradients, RIGHT, rank)
    first = next((place for place in _moments() if not _same(found, right, place)), None)
    if first is None:
        return ""
    step, name = first
    where = f"{moment(NAMES[name], step)} on rank {rank}"
    own = gradients[step][name][rank]
    value = found[step][name]
    if value is None:
        return f"{where}: the gradient is missing"
    if not value.isfinite().all():
        return f"{where}: the average is not finite"
    if step == 0 and near(value, own):
        return f"{where}: the gradient is still the rank's own: change `gradient` itself, in place"
    if step == 0 and near(value, torch.stack(list(gradients[step][name])).mean(dim=0)):
        belong = count_of(SHARE, len(own), RIGHT)
        return f"{where}: the complete average arrived, but only {belong} elements of each rank belong there"
    for mistake in MISTAKES:
        made = simulate(gradients, mistake, rank)
        if all(_same(found, made, place) for place in _moments()):
            return f"{where}: {mistake.words}"
    return f"{where}: {furthest_off(value, right[step][name])}"


def _moments() -> list[tuple[int, int]]:
    return [(step, name) for step in range(STEPS) for name in range(len(NAMES))]


def _same(
    found: Sequence[Sequence[torch.Tensor | None]], right: Sequence[Sequence[torch.Tensor]], place: tuple[int, int]
) -> bool:
    value = found[place[0]][place[1]]
    return value is not None and near(value, right[place[0]][place[1]])


@sends_the_largest.judgement
def _(world: World) -> None:
    count = count_of(SHARE, ELEMENTS, RIGHT)
    most = (world.size - 1) * 8 * count
    for step in range(2):
        for name in NAMES:
            for rank, sent in enumerate(world.reported(moment(name, step), int)):
                world.require(sent > 0 or world.size == 1, f"rank {rank} sent nothing of {name} through comm", rank)
                why = f"the {count} largest of {ELEMENTS} elements, 4 bytes each and 4 for each place"
                if sent == (world.size - 1) * 12 * count:
                    why += "; a place as int64 takes 8, send it as int32"
                elif sent >= round(2 * (world.size - 1) / world.size * 4 * ELEMENTS):
                    why += "; all elements are sent, zeros too"
                message = f"rank {rank} sent {sent:,} bytes of {name} and should send at most {most:,}: {why}"
                world.require(sent <= most, message, rank)


@Claim
def trains(on: OnLesson) -> None:
    """A small network that is trained with it ends near the loss that it has with exact averages."""
    codec, model = on.student.TopK(on.comm, TRAINED_SHARE), network(on.nonce)
    inputs, targets = examples(on.nonce, on.rank)
    for _ in range(TRAINED_STEPS):
        nn.functional.mse_loss(model(inputs), targets).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        codec.average("all", flat)
        add_flat(model.parameters(), -RATE * flat)
        model.zero_grad()
    on.hand_in("after training", model.state_dict())


def network(nonce: int) -> nn.Module:
    """Two layers, with weights drawn from the nonce."""
    return seeded(nonce, lambda: nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4)))


def examples(nonce: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's inputs (64, 16), and what a teacher, the same for all ranks, says of them (64, 4)."""
    generator = torch.Generator().manual_seed(nonce + 7)
    one, two = torch.randn(16, 24, generator=generator) / 4, torch.randn(24, 4, generator=generator) / 4
    generator.manual_seed(seed_of(nonce, rank) + 70)
    inputs = torch.randn(64, 16, generator=generator)
    return inputs, torch.tanh(inputs @ one) @ two


@trains.judgement
def _(world: World) -> None:
    exact = loss_of(trained(world.nonce, world.size, 1.0, RIGHT), world.nonce, world.size)
    without = loss_of(trained(world.nonce, world.size, TRAINED_SHARE, MISTAKES[0]), world.nonce, world.size)
    most = exact + BAND * (without - exact)
    like = network(world.nonce).state_dict()
    for rank, weights in enumerate(world.handed_in("after training", like)):
        loss = loss_of(weights, world.nonce, world.size)
        world.require(
            loss <= most,
            f"after {TRAINED_STEPS} steps the loss is {loss:.4f} and should be at most {most:.4f}: exact averages end "
            f"at {exact:.4f}, and the largest elements without error feedback at {without:.4f}",
            rank,
        )


def trained(nonce: int, size: int, share: float, way: TopKVariant) -> dict[str, torch.Tensor]:
    """The weights after training on `size` ranks, simulated in one process."""
    model, data = network(nonce), [examples(nonce, rank) for rank in range(size)]
    simulation = Simulation(share, way)
    for _ in range(TRAINED_STEPS):
        losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in data]
        by_rank = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        flats = [torch.cat([gradient.flatten() for gradient in gradients]) for gradients in by_rank]
        add_flat(model.parameters(), -RATE * simulation.average("all", flats)[0])
    return model.state_dict()


def loss_of(weights: Mapping, nonce: int, size: int) -> float:
    """The mean loss on all ranks' examples."""
    return mean_loss(network(nonce), weights, [examples(nonce, rank) for rank in range(size)])


def near(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether they are equal up to rounding; NaN is near nothing."""
    return bool((found - right).abs().max() <= allowed(right))


def allowed(right: torch.Tensor) -> float:
    """By how much an element may be off."""
    return NEAR * max(right.abs().max().item(), 1e-3)
