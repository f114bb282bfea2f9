"""What lessons 6 and 7 share: calls that begin while backward runs, in one order whatever gradients arrive in."""

import time

import torch
from torch import nn

from cos598d.tools.exam.explain import explain
from cos598d.tools.exam.models import gradients_of, seeded

# All layers are of one size, so that to mix them up is no error; each is larger than a bucket of lesson 7.
WIDTH, BRANCHES, STEPS = 24, 4, 2
NARROW = 10  # of a chain of layers
NEAR = 1e-3  # of the largest element
MOST_MOVED = 1.25  # times the gradients: ranks may agree on what was used, too
LATE = 3  # gradients that may come before a call is begun that could have been: buckets differ in how many they take


class Branches(nn.Module):
    """Layers side by side, of one size, added up in an order that each rank chooses: so backward comes in another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, order):
        """Inputs (batch, WIDTH) and the branches in order: the loss."""
        hidden = torch.tanh(self.first(inputs))
        total = torch.zeros_like(hidden)
        for branch in order:
            total = total + torch.tanh((branch + 1) * self.branches[branch](hidden))
        return self.last(total).square().mean()


class Chain(nn.Module):
    """Layers one behind the other, and a scale in the middle of another dtype: backward goes through them in reverse.

    Some tensors share a bucket of lesson 7's, also the scale with its neighbours, for those who mind no dtype.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(3))
        self.scale = _Scale()
        self.middle = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(2))
        self.last = nn.Linear(NARROW, NARROW)

    def forward(self, inputs):
        """Inputs (batch, NARROW): the loss."""
        hidden = inputs
        for layer in (*self.first, self.scale, *self.middle):
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden).square().mean()


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(NARROW, dtype=torch.float64) + 0.5)

    def forward(self, inputs):
        return inputs * self.weight.float()


def branches_loss(model, seed, rank, step):
    """The loss of what a rank sees in a step, through the branches in an order of its own."""
    inputs = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed + 100 * rank + step))
    return model(inputs, [(place + rank + step) % BRANCHES for place in range(BRANCHES)])


def chain_loss(model, seed, rank, step):
    """The loss of what a rank sees in a step, through the chain."""
    return model(torch.randn(5, NARROW, generator=torch.Generator().manual_seed(seed + 100 * rank + step)))


MODELS = {"branches": (Branches, branches_loss), "chain": (Chain, chain_loss)}


def overlapped_steps(comm, module, seed, make, which):
    """On a rank: two steps of a model, with the moments at which gradients come and backward ends.

    make: of the student's module, the communicator and the model makes an object with `finish`.
    """
    kind, loss_of = MODELS[which]
    model, grads, arrived, ended = seeded(seed, kind), [], [], 0.0
    for p in model.parameters():  # before the student's hooks, which then find their gradient noted
        p.register_post_accumulate_grad_hook(lambda _: arrived.append(time.perf_counter()))
    averager = make(module)(comm, model)
    for step in range(STEPS):
        arrived.clear()
        begun = len(comm.rows)
        loss_of(model, seed, comm.rank, step).backward()
        ended = time.perf_counter()
        averager.finish()
        grads.append(gradients_of(model))
        model.zero_grad(set_to_none=True)
    return {"grads": grads, "arrived": arrived, "ended": ended, "begun": begun}


def own_gradients_of(which, seed, rank, step):
    """A rank's own gradients of a step, by one process."""
    kind, loss_of = MODELS[which]
    model = seeded(seed, kind)
    loss_of(model, seed, rank, step).backward()
    return gradients_of(model)


def keeps_one_order(world, seed, words):
    """Fail unless the means are right where gradients arrive in another order on each rank."""
    for step in range(STEPS):
        own = [own_gradients_of("branches", seed, rank, step) for rank in range(world.size)]
        wrong = explain([value["grads"][step] for value in world.values], own, words=words)
        if wrong:
            rank, told, detail = wrong
            world.fail(told, rank, detail)


def begins_during_backward(world, seed):
    """Fail unless each call begins soon after its gradients are there, and none is waited for before finish()."""
    for rank, value in enumerate(world.values):
        _judge_calls(world, rank, value)
    for step in range(STEPS):
        own = [own_gradients_of("chain", seed, rank, step) for rank in range(world.size)]
        for rank, value in enumerate(world.values):
            for name, found in value["grads"][step].items():
                total = torch.stack([each[name] for each in own]).sum(dim=0)
                words = f"rank {rank} has no average of {name} after the step whose calls are checked"
                words += ": what begins while backward runs must be what is averaged"
                world.require(_is_multiple(found, total), words, rank)


def _is_multiple(found, total):
    if found is None or not found.isfinite().all():
        return False
    factor = ((found * total).sum() / total.square().sum()).item()
    return factor > 0 and bool((found - factor * total).abs().max() <= NEAR * factor * total.abs().max())


def _judge_calls(world, rank, value):
    """When the calls of the last step began, next to the gradients that were there."""
    calls, ended = world.traces[rank].calls[value["begun"] :], value["ended"]
    early = [call for call in calls if call.start < ended]
    gradients = [*seeded(0, Chain).parameters()]
    count, size = len(gradients), sum(each.nbytes for each in gradients)
    words = f"rank {rank} begins {len(early)} of {len(calls)} calls before backward ends, expected most of them: begin "
    words += f"each in the hook of its gradient (model of {count} gradients)"
    world.require(2 * len(early) >= len(calls) and bool(early), words, rank)
    moved, soon = (sum(call.bytes for call in some) for some in (calls, early))
    words = f"rank {rank} makes {moved} bytes of calls for {size} bytes of gradients, and begins {soon} of them before "
    words += "backward ends: expected most of them, and each gradient in one call"
    world.require(moved <= MOST_MOVED * size and 2 * soon >= size, words, rank)
    waited = next((call for call in calls if call.is_over and call.end < ended), None)
    words = f"rank {rank} waits for {waited.op if waited else ''} of {waited.tensor if waited else ''} while backward "
    words += "runs, so backward stops: begin it with async_op=True in the hook, and wait in finish()"
    world.require(waited is None, words, rank)
    for place, call in enumerate(calls, 1):
        # Where calls take as many gradients each, the first is due when its share of them is there.
        there, due = sum(moment <= call.start for moment in value["arrived"]), -(-place * count // len(calls))
        words = f"rank {rank} begins call {place} of {len(calls)} when {there} of {count} gradients are there"
        words += f", expected about {due}: begin each call as soon as its gradients are there, in the order in which "
        world.require(there <= due + LATE, words + "backward reaches them, from the last layer to the first", rank)
