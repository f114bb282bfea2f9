"""Lesson 12, talk less: rounds, bytes, and the formula of the outer step."""

import pytest
import torch
from torch import nn

from cos598d.tools.course.common import name_mistake, near
from cos598d.tools.exam.models import seeded

RATE = 0.2
EVERY = (3, 2, 4)  # one of these, by the seed
PLAIN, MOMENTUM = "the plain average", "an outer step with momentum"
SETTINGS = {MOMENTUM: (0.7, 0.9), PLAIN: (1.0, 0.0)}  # outer rate and momentum
MISTAKES = {
    "the weights are the sum over the ranks and should be their average: divide by n": {"average": "sum"},
    "the weights were not averaged over the ranks: each rank steps by how far it moved itself": {"average": "own"},
    "the outer step goes the wrong way: moved is agreed - average, and is subtracted": {"sign": 1.0},
    "the step does not look ahead: step by moved + outer_momentum * momentum, not only by momentum": {
        "momentum": "heavy"
    },
    "momentum does not build up: it is outer_momentum * (what it was) + moved": {"momentum": "forgotten"},
    "the outer step has no momentum": {"momentum": "none"},
    "the agreed weights stay what they were at the start: keep the weights after each round": {"agreed": "stays"},
    "the agreed weights are the model's own memory, which training changes: keep a copy (clone)": {"agreed": "shared"},
    "the average replaces the agreed weights: keep the weights after the outer step": {"agreed": "average"},
    "after a round the ranks still have their own weights: put the agreed weights back into the model": {
        "put_back": False
    },
}


def drawn(seed):
    """Every how many steps a round comes, and the steps: three rounds, and one step more."""
    every = EVERY[seed % len(EVERY)]
    return every, 3 * every + 1


class Network(nn.Module):
    """Two layers, and one between them that does not train."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = (
            nn.Linear(12, 16),
            nn.Linear(16, 16).requires_grad_(False),
            nn.Linear(16, 3),
        )

    def forward(self, inputs):
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(inputs)))))


def batch(seed, rank, step):
    """Inputs from a rank's own corner, and a teacher's answers."""
    generator = torch.Generator().manual_seed(seed + 7)
    teacher = torch.randn(12, 3, generator=generator) / 3
    inputs = torch.randn(16, 12, generator=generator.manual_seed(seed + 1000 * rank + step))
    inputs[:, rank % 12] += 2.0  # ranks whose data are alike would need no talk
    return inputs, torch.sin(inputs @ teacher)


def train_step(model, seed, rank, step):
    inputs, targets = batch(seed, rank, step)
    nn.functional.mse_loss(model(inputs), targets).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data -= RATE * p.grad
            p.grad = None


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def simulate(
    seed, size, every, steps, outer, average="mean", sign=-1.0, momentum="nesterov", agreed="moves", put_back=True
):
    """The weights by name after each step, [step][rank], as the formula has it, or with a mistake."""
    models = [seeded(seed, Network) for _ in range(size)]
    weights = [[p for p in model.parameters() if p.requires_grad] for model in models]

    def flat():
        return [nn.utils.parameters_to_vector(each).detach() for each in weights]

    known, speed, found = flat(), [0.0] * size, []
    for step in range(steps):
        for rank, model in enumerate(models):
            train_step(model, seed, rank, step)
        if (step + 1) % every == 0:
            now = flat()
            total = torch.stack(now).sum(dim=0)
            for rank in range(size):
                mean = {"mean": total / size, "sum": total, "own": now[rank]}[average]
                before = (now if agreed == "shared" else known)[rank]
                moved = before - mean
                speed[rank] = (0.0 if momentum == "forgotten" else outer[1]) * speed[rank] + moved
                ahead = {"heavy": speed[rank], "none": moved}.get(momentum, moved + outer[1] * speed[rank])
                new = before + sign * outer[0] * ahead
                known[rank] = {"stays": known[rank], "average": mean}.get(agreed, new)
                if put_back:
                    nn.utils.vector_to_parameters(new.clone(), weights[rank])
        found.append([weights_of(model) for model in models])
    return found


def rounds(comm, module, seed, every, steps, settings):
    """On a rank: after each step of a student's LocalSGD the weights, and the bytes of each call."""
    model, found, calls = seeded(seed, Network), [], []
    local = module.LocalSGD(comm, model, every, *settings)
    for step in range(steps):
        train_step(model, seed, comm.rank, step)
        before = len(comm.rows)
        local.after_step()
        calls.append([row.bytes_sent for row in comm.rows[before:]])
        found.append(weights_of(model))
    return {"weights": found, "calls": calls}


@pytest.mark.parametrize("n", [3, 2])
def test_makes_one_call_a_round(ranks, seed, n):
    """One call every `every` steps, of 2(n-1)/n S bytes for the weights that train; nothing is sent between."""
    every, steps = drawn(seed)
    world = ranks(n, rounds, seed, every, steps, SETTINGS[MOMENTUM])
    sizes = [(p.nbytes, p.requires_grad) for p in Network().parameters()]
    right = round(2 * (n - 1) / n * sum(size for size, trains in sizes if trains))
    with_frozen = round(2 * (n - 1) / n * sum(size for size, _ in sizes))
    for rank, value in enumerate(world.values):
        for step, calls in enumerate(value["calls"], 1):
            made = f"rank {rank} makes {len(calls)} call{'s' * (len(calls) != 1)}"
            if step % every:
                words = f"{made} after step {step}, expected none: with every = {every} the rounds come after steps "
                world.require(not calls, f"{words}{every}, {2 * every} and so on", rank)
                continue
            words = f"{made} in the round after step {step}, expected 1: "
            world.require(bool(calls), f"{words}count the step first, then test whether it ends a round", rank)
            world.require(len(calls) < 2, f"{words}put all weights into one tensor", rank)
            why = ": weights that do not train are sent too" if abs(calls[0] - with_frozen) <= 2 else ""
            words = f"rank {rank} of {n} sends {calls[0]} bytes in a round, expected 2(n-1)/n S = {right}{why}"
            world.require(abs(calls[0] - right) <= 2, words, rank)


@pytest.mark.parametrize("n", [3, 2])
def test_steps_as_the_formula(ranks, seed, n):
    """After each round every rank has the weights of the formula; between rounds each rank's are its own."""
    every, steps = drawn(seed)
    for label, outer in SETTINGS.items():
        world = ranks(n, rounds, seed, every, steps, outer)
        right = simulate(seed, n, every, steps, outer)
        for rank in range(n):
            judge_weights(world, rank, [each[rank] for each in right], (seed, n, every, steps, outer), label)


def judge_weights(world, rank, right, settings, label):
    """Fail unless a rank's weights are right after every step."""
    _, _, every, steps, _ = settings
    found = world.values[rank]["weights"]
    step = next((step for step in range(steps) if not near(found[step], right[step])), None)
    if step is None:
        return
    where = f"with {label}, after step {step + 1}, rank {rank}"
    between = f"{where}: the weights are not the rank's own: between rounds nothing may change them"
    world.require((step + 1) % every == 0, between, rank)

    def makes(how):
        return lambda: [each[rank] for each in simulate(*settings, **how)]

    made = {words: makes(how) for words, how in MISTAKES.items()}
    world.fail(f"{where}: {name_mistake(found, right, made).removeprefix(str(step)).strip()}", rank)
