"""Lesson 12, talk less: rounds, bytes, the formula of the outer step, and the loss that results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.check.toy import seeded
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.common import add_flat, furthest_off, mean_loss, near

RATE = 0.2

Weights = dict[str, torch.Tensor]


class TwoLayers(nn.Module):
    """Two layers, and one between them that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, 12) to (batch, 3)."""
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(inputs)))))


def network(nonce: int) -> TwoLayers:
    """Its weights drawn from the nonce."""
    return seeded(nonce, TwoLayers)


def batch(nonce: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sees in a step: inputs (16, 12) from its own corner, and a teacher's answers (16, 3)."""
    generator = torch.Generator().manual_seed(nonce + 7)
    teacher = torch.randn(12, 3, generator=generator) / 3
    generator.manual_seed(seed_of(nonce, rank) + step)
    inputs = torch.randn(16, 12, generator=generator)
    inputs[:, rank % 12] += 2.0  # ranks whose data are alike would need no talk
    return inputs, torch.sin(inputs @ teacher)


def train_step(model: nn.Module, nonce: int, rank: int, step: int) -> None:
    """A step of plain SGD on a rank's own batch."""
    inputs, targets = batch(nonce, rank, step)
    nn.functional.mse_loss(model(inputs), targets).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data -= RATE * p.grad
            p.grad = None


@dataclass(frozen=True)
class OuterStepVariant:
    """A way to do the outer step, right or wrong; `words` say what is wrong with it."""

    words: str
    average: str = "mean"
    sign: float = -1.0
    momentum: str = "nesterov"
    agreed: str = "moves"
    put_back: bool = True


RIGHT = OuterStepVariant("")
MISTAKES = (
    OuterStepVariant("the weights are the sum over the ranks and should be their average: divide by n", average="sum"),
    OuterStepVariant(
        "the weights were not averaged over the ranks: each rank steps by how far it moved itself", average="own"
    ),
    OuterStepVariant("the outer step goes the wrong way: moved is agreed - average, and is subtracted", sign=1.0),
    OuterStepVariant(
        "the step does not look ahead: step by moved + outer_momentum * momentum, not only by momentum",
        momentum="heavy",
    ),
    OuterStepVariant("momentum does not build up: it is outer_momentum * (what it was) + moved", momentum="forgotten"),
    OuterStepVariant("the outer step has no momentum", momentum="none"),
    OuterStepVariant(
        "the agreed weights stay what they were at the start: keep the weights after each round", agreed="stays"
    ),
    OuterStepVariant(
        "the average replaces the agreed weights: keep the weights after the outer step", agreed="average"
    ),
    OuterStepVariant(
        "after a round the ranks still have their own weights: put the agreed weights back into the model",
        put_back=False,
    ),
)


def simulate(
    nonce: int, size: int, every: int, steps: int, outer: tuple[float, float], way: OuterStepVariant
) -> list[list[Weights]]:
    """The weights by name after each step: [step][rank]."""
    rate, mu = outer
    models = [network(nonce) for _ in range(size)]
    flats = [_flat(model) for model in models]
    agreed, momentum = [flat.clone() for flat in flats], [torch.zeros_like(flat) for flat in flats]
    found = []
    for step in range(steps):
        for rank, model in enumerate(models):
            train_step(model, nonce, rank, step)
        if (step + 1) % every == 0:
            flats = [_flat(model) for model in models]
            total = torch.stack(flats).sum(dim=0)
            for rank, model in enumerate(models):
                average = {"mean": total / size, "sum": total, "own": flats[rank]}[way.average]
                moved = agreed[rank] - average
                momentum[rank] = (0.0 if way.momentum == "forgotten" else mu) * momentum[rank] + moved
                ahead = {"heavy": momentum[rank], "none": moved}.get(way.momentum, moved + mu * momentum[rank])
                new = agreed[rank] + way.sign * rate * ahead
                if way.agreed != "stays":
                    agreed[rank] = average if way.agreed == "average" else new
                if way.put_back:
                    add_flat([p for p in model.parameters() if p.requires_grad], new - flats[rank])
        found.append([{name: p.detach().clone() for name, p in model.named_parameters()} for model in models])
    return found


def same(found: Mapping[str, torch.Tensor | None], right: Weights) -> bool:
    """Whether weights by name are equal up to rounding."""
    return all(near(found[name], tensor) for name, tensor in right.items())


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.data.flatten() for p in model.parameters() if p.requires_grad])


EVERY, STEPS = 3, 10  # three rounds, and a step of the next
AVERAGE, MOMENTUM = "the plain average", "an outer step with momentum"
SETTINGS = {MOMENTUM: (0.7, 0.9), AVERAGE: (1.0, 0.0)}  # outer rate and momentum
LONG_EVERY, LONG_STEPS = 8, 64
WITHIN = 0.01  # of the formula's loss: rounding, which grows over the steps


def rounds(on: OnLesson, label: str, after: Callable[[int, nn.Module], None]) -> None:
    """Some rounds, and a step more, of a student's LocalSGD; `after(step, model)` is called after each step."""
    model = network(on.nonce)
    local = on.student.LocalSGD(on.comm, model, EVERY, *SETTINGS[label])
    for step in range(STEPS):
        train_step(model, on.nonce, on.rank, step)
        on.fresh_ledger()
        local.after_step()
        after(step, model)


@Claim
def makes_one_call_a_round(on: OnLesson) -> None:
    """One call every `every` steps, of 2(n-1)/n S bytes for the weights that train; nothing is sent between."""
    calls: list[list[int]] = []
    rounds(on, MOMENTUM, lambda step, model: calls.append([row.bytes_sent for row in on.comm.ledger.rows]))
    on.report("calls", calls)


@makes_one_call_a_round.judgement
def _(world: World) -> None:
    sizes = [(p.nbytes, p.requires_grad) for p in network(0).parameters()]
    trains, every = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    right, with_frozen = (round(2 * (world.size - 1) / world.size * size) for size in (trains, every))
    for rank, by_step in enumerate(world.reported("calls", list)):
        for step, calls in enumerate(by_step, 1):
            made = number_of(len(calls), "call")
            if step % EVERY:
                words = (
                    f"rank {rank} makes {made} after step {step}, expected none: with every = {EVERY} the rounds come"
                )
                world.require(not calls, f"{words} after steps {EVERY}, {2 * EVERY} and so on", rank)
                continue
            words = f"rank {rank} makes {made} in the round after step {step}, expected 1"
            world.require(len(calls) > 0, f"{words}: count the step first, then test whether it ends a round", rank)
            world.require(len(calls) < 2, f"{words}: put all weights into one tensor", rank)
            if len(calls) == 1:
                words = f"rank {rank} of {world.size} sends {calls[0]} bytes in a round, expected 2(n-1)/n S = {right}"
                why = ": weights that do not train are sent too" if abs(calls[0] - with_frozen) <= 2 else ""
                world.require(abs(calls[0] - right) <= 2, words + why, rank)


@Claim
def steps_as_the_formula(on: OnLesson) -> None:
    """After each round every rank has the weights of the formula; between rounds each rank's are its own."""
    for label in SETTINGS:

        def after(step: int, model: nn.Module, label: str = label) -> None:
            on.hand_in(moment(label, step), dict(model.named_parameters()))

        rounds(on, label, after)


@steps_as_the_formula.judgement
def _(world: World) -> None:
    like = dict(network(0).named_parameters())
    for label, outer in SETTINGS.items():
        by_step = [world.handed_in(moment(label, step), like) for step in range(STEPS)]
        right = simulate(world.nonce, world.size, EVERY, STEPS, outer, RIGHT)
        for rank in range(world.size):
            words = wrong_weights(world, label, by_step, right, rank)
            world.require(not words, words, rank)


@Claim
def trains(on: OnLesson) -> None:
    """A network that is trained in rounds ends with the loss of the formula, within 1 %."""
    model = network(on.nonce)
    local = on.student.LocalSGD(on.comm, model, LONG_EVERY, *SETTINGS[MOMENTUM])
    for step in range(LONG_STEPS):
        train_step(model, on.nonce, on.rank, step)
        local.after_step()
    on.hand_in("after training", dict(model.named_parameters()))


@trains.judgement
def _(world: World) -> None:
    def loss_by(every: int, label: str) -> float:
        last = simulate(world.nonce, world.size, every, LONG_STEPS, SETTINGS[label], RIGHT)[-1]
        return sum(loss_of(weights, world) for weights in last) / world.size

    right = loss_by(LONG_EVERY, MOMENTUM)
    for rank, weights in enumerate(world.handed_in("after training", dict(network(0).named_parameters()))):
        found = loss_of(weights, world)
        if not abs(found - right) <= WITHIN * right:
            words = f"after {LONG_STEPS} steps in {LONG_STEPS // LONG_EVERY} rounds rank {rank}'s loss is {found:.4f}, "
            words += f"and the formula's is {right:.4f}: averages in every step end at {loss_by(1, AVERAGE):.4f}, "
            world.find(rank, f"{words}ranks that never communicate at {loss_by(LONG_STEPS + 1, AVERAGE):.4f}")
            return


def moment(label: str, step: int) -> str:
    """What a step with a setting is called."""
    return f"with {label}, after step {step + 1}"


def wrong_weights(
    world: World, label: str, by_step: Sequence[Sequence[Mapping]], right: Sequence[Sequence[Weights]], rank: int
) -> str:
    """What is wrong with a rank's weights, step by step, in words; "" if nothing is."""
    steps = range(len(right))
    first = next((step for step in steps if not same(by_step[step][rank], right[step][rank])), None)
    if first is None:
        return ""
    where = f"{moment(label, first)}, rank {rank}"
    found = by_step[first][rank]
    if any(tensor is None or not tensor.isfinite().all() for tensor in found.values()):
        return f"{where}: a weight is not finite"
    if (first + 1) % EVERY:
        after = "before the first round" if first < EVERY else f"{(first + 1) % EVERY} steps after a round"
        return f"{where}: the weights are not the rank's own {after}: between rounds nothing may change them"
    for mistake in MISTAKES:
        made = simulate(world.nonce, world.size, EVERY, len(right), SETTINGS[label], mistake)
        if all(same(by_step[step][rank], made[step][rank]) for step in steps):
            return f"{where}: {mistake.words}"
    name = next(name for name, tensor in right[first][rank].items() if not near(found[name], tensor))
    return f"{where}, {name}: {furthest_off(found[name], right[first][rank][name])}"


def loss_of(weights: Mapping, world: World) -> float:
    """The mean loss on a batch of each rank that no training has seen."""
    return mean_loss(network(0), weights, [batch(world.nonce, rank, LONG_STEPS + 1) for rank in range(world.size)])


@Claim
def record(on: OnLesson) -> None:
    """The steps of a round and one more."""
    model = network(on.nonce)
    local = on.student.LocalSGD(on.comm, model, EVERY, *SETTINGS[MOMENTUM])
    on.comm.exchange("all are here")
    on.comm.begin_record()
    for step in range(EVERY + 1):
        train_step(model, on.nonce, on.rank, step)
        on.comm.computed(f"step {step + 1}")
        local.after_step()
    on.report_events()


CHECKS = Checks(
    (Check(makes_one_call_a_round, (3, 2)), Check(steps_as_the_formula, (3, 2)), Check(trains, (3,))), record=record
)
