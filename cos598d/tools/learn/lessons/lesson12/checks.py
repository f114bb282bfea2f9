"""Lesson 12, talk less: rounds, bytes, the formula of the outer step, and the loss that comes of it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.lesson12.outer_step import (
    MISTAKES,
    RIGHT,
    Weights,
    batch,
    near,
    network,
    same,
    simulate,
    train_step,
)

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
    """One call every `every` steps, of 2(n-1)/n S bytes for the weights that train; nothing travels between."""
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
            world.require(len(calls) > 0, f"{words}: count the step first, then ask whether it ends a round", rank)
            world.require(len(calls) < 2, f"{words}: put all weights into one tensor", rank)
            if len(calls) == 1:
                words = f"rank {rank} of {world.size} sends {calls[0]} bytes in a round, expected 2(n-1)/n S = {right}"
                why = ": weights that do not train travel too" if abs(calls[0] - with_frozen) <= 2 else ""
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
    def mean_loss(every: int, label: str) -> float:
        last = simulate(world.nonce, world.size, every, LONG_STEPS, SETTINGS[label], RIGHT)[-1]
        return sum(loss_of(weights, world) for weights in last) / world.size

    right = mean_loss(LONG_EVERY, MOMENTUM)
    for rank, weights in enumerate(world.handed_in("after training", dict(network(0).named_parameters()))):
        found = loss_of(weights, world)
        if not abs(found - right) <= WITHIN * right:
            words = f"after {LONG_STEPS} steps in {LONG_STEPS // LONG_EVERY} rounds rank {rank}'s loss is {found:.4f}, "
            words += f"and the formula's is {right:.4f}: averages in every step end at {mean_loss(1, AVERAGE):.4f}, "
            world.find(rank, f"{words}ranks that never talk at {mean_loss(LONG_STEPS + 1, AVERAGE):.4f}")
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
    element = int((found[name] - right[first][rank][name]).abs().argmax())
    values = (each[name].flatten()[element] for each in (found, right[first][rank]))
    return f"{where}: element {element} of {name} is {next(values):.5g} and should be {next(values):.5g}"


def loss_of(weights: Mapping, world: World) -> float:
    """The mean loss on a batch of each rank that no training has seen."""
    model = network(0)
    model.load_state_dict(weights)
    with torch.no_grad():
        data = [batch(world.nonce, rank, LONG_STEPS + 1) for rank in range(world.size)]
        return torch.stack([nn.functional.mse_loss(model(x), y) for x, y in data]).mean().item()


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
