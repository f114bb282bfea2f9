"""`cos598d.parallelize`: every strategy in a script's own loop ends with the bits of one process on the whole batch."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import run_ranks

import cos598d
from cos598d.sync import SYNCS, get_sync

SHARDS = ["zero1", "zero2", "zero3", "sparse_zero1", "shared_weights"]
AVERAGES = [name for name in SYNCS if get_sync(name).exact and name != "none"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
QUANTUM = 144 / 2**22  # gradients are multiples of it: sums of them, and twice a half, third or quarter, are exact


class Linear(nn.Linear):
    """Float32 weights that compute in float64, so that gradients do not depend on how kernels add up."""

    def forward(self, x):
        return nn.functional.linear(x.double(), self.weight.double(), self.bias.double())


class Head(nn.Module):
    """A layer of which a part is not always used: zero3 wants all ranks to use all layers."""

    def __init__(self):
        super().__init__()
        self.sometimes, self.output = Linear(31, 31), Linear(31, 3)

    def forward(self, state, use):
        return self.output(self.sometimes(state) if use else state)


class Model(nn.Module):
    """An embedding that travels by rows, layers with a tied weight, a frozen one, one that not all use, a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(9001, 31)
        self.frozen = Linear(31, 31).requires_grad_(False)
        self.layers = nn.ModuleList([Linear(31, 31) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight
        self.head = Head()
        self.register_buffer("calls", torch.full((), float(seed)))
        self.checkpoints = None  # or whether they are reentrant
        for p in self.parameters():
            if p.requires_grad:
                p.register_hook(rounded)

    def forward(self, ids, use=False):
        self.calls += 1
        state = self.frozen(self.embedding(ids).mean(dim=1))
        for layer in self.layers:
            call = functools.partial(checkpoint, layer, use_reentrant=self.checkpoints)
            state = torch.tanh(layer(state) if self.checkpoints is None else call(state))
        return {"logits": self.head(state, use)}


def rounded(gradient):
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return torch.sparse_coo_tensor(gradient.indices(), rounded(gradient.values()), gradient.shape)
    return (gradient / QUANTUM).round() * QUANTUM


def loss_of(module, rank, step):
    ids = torch.randint(0, 9001, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return 3 * module(ids, use=rank == 0 and step % 3 == 1)["logits"].square().mean()


class OneProcess:
    """One process in place of `ranks`: what each of them would add to the gradients, in turn, and then the average."""

    def __init__(self, model, ranks):
        self.module, self.ranks = model, range(ranks)

    def backward(self, *losses):
        for rank in self.ranks:
            for loss in losses:
                loss(self.module, rank).backward()

    def average(self, factor=1.0):
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad *= factor / len(self.ranks)

    def step(self, optimizer, *losses, factor=1.0, max_norm=None):
        self.backward(*losses)
        self.average(factor)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
            assert norm > max_norm, "nothing was clipped"
        optimizer.step()
        optimizer.zero_grad()


def plainly(module, optimizer, rank, step):
    loss_of(module, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def plainly_in_one(reference, optimizer, step):
    reference.step(optimizer, lambda m, r: loss_of(m, r, step))


def accumulating(module, optimizer, rank, step):
    optimizer.zero_grad()
    with module.no_sync():
        loss_of(module, rank, 50 + step).backward()
        loss_of(module, rank, 60 + step).backward()
    plainly(module, optimizer, rank, step)


def adding(module, optimizer, rank, step):
    for part in (50, 60):
        loss_of(module, rank, part + step).backward()
    plainly(module, optimizer, rank, step)


def three_parts_in_one(reference, optimizer, step):
    reference.backward(*(lambda m, r, part=part: loss_of(m, r, part + step) for part in (50, 60)))
    plainly_in_one(reference, optimizer, step)


def reading(module, optimizer, rank, step):
    """A norm, and an average of the weights, as scripts keep one."""
    loss_of(module, rank, step).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    assert torch.allclose(norm, module.clip_grad_norm_(1e9), rtol=1e-5)
    optimizer.step()
    assert sum(p.detach().sum() for p in module.parameters()) is not None
    module.zero_grad()


def clipping(module, optimizer, rank, step):
    loss_of(module, rank, step).backward()
    module.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()


def clipping_by_torch(module, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(module, rank, step).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()


def clipping_in_one(reference, optimizer, step):
    reference.step(optimizer, lambda m, r: loss_of(m, r, step), max_norm=0.1)


def by_closure(module, optimizer, rank, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(module, rank, step)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


# By name: what a rank does in a step, what one process does, whether the bits are the same, and how models are set.
CASES = {
    "plain": (plainly, plainly_in_one, True, None),
    "accumulated": (accumulating, three_parts_in_one, True, None),
    "added": (adding, three_parts_in_one, True, None),
    "read": (reading, plainly_in_one, True, None),
    "closure": (by_closure, plainly_in_one, True, None),
    "clipped": (clipping, clipping_in_one, False, None),
    "clipped by torch": (clipping_by_torch, clipping_in_one, False, None),
    "checkpointed": (plainly, plainly_in_one, True, False),
    "checkpointed, reentrant": (plainly, plainly_in_one, True, True),
}


def assert_as(state, model, what, within=0.0):
    for name, expected in model.named_parameters():
        worst = (state[name] - expected).abs().max().item()
        assert worst <= within, f"{what}: {name} is off by {worst:.1e}"


def assert_state_as(state, expected, what, **within):
    """An optimizer's groups and values, to the last bit if no tolerances are given."""
    assert state["param_groups"] == expected["param_groups"], what
    within = within or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(state["state"], expected["state"], msg=lambda text: f"{what}: {text}", **within)


def trains_as_one(comm, strategies, cases, optimizers=tuple(OPTIMIZERS), steps=3):
    """Every one of these cases under every one of these optimizers; how many there were."""
    for strategy, case, name in itertools.product(strategies, cases, optimizers):
        make = OPTIMIZERS[name]
        if case == "two models":
            two_models(comm, strategy, name, make)
            continue
        ours, theirs, exactly, checkpoints = CASES[case]
        model, expected = Model(comm.rank), Model(0)
        model.checkpoints = expected.checkpoints = checkpoints
        module, optimizer = cos598d.parallelize(model, make, strategy)
        assert isinstance(optimizer, torch.optim.Optimizer)
        reference, single = OneProcess(expected, comm.world_size), make(expected.parameters())
        for step in range(steps):
            ours(module, optimizer, comm.rank, step)
            theirs(reference, single, step)
        # Where norms differ in the last bits, a gradient may be rounded to another multiple in the next step.
        within = 0.0 if exactly else 2e-4 if name == "adamw" else 2e-6
        assert_as(module.full_state_dict(), expected, f"{strategy}, {case}, {name}", within)
        module.detach()
    return len(strategies) * len(cases) * len(optimizers)


class Generator(nn.Module):
    """From ids to what the discriminator, a Sequential of layers, tells from real vectors."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.output = nn.Embedding(9001, 31), Linear(31, 31)
        for p in self.parameters():
            p.register_hook(rounded)

    def forward(self, ids):
        return torch.tanh(self.output(self.embedding(ids).mean(dim=1)))


def discriminator(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(Linear(31, 31), nn.Tanh(), Linear(31, 1))
    for p in model.parameters():
        p.register_hook(rounded)
    return model


def fake_loss(generator, judge, rank, step, goal):
    ids = torch.randint(0, 9001, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    made = generator(ids)
    return (judge(made if goal else made.detach()) - goal).square().mean()


def real_loss(judge, rank, step):
    real = torch.randn(4, 31, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (judge(real) - 1).square().mean()


def two_models(comm, strategy, name, make):
    """A generator and a discriminator, which in one step is frozen while the generator learns."""
    ours = [cos598d.parallelize(m(comm.rank), make, strategy) for m in (Generator, discriminator)]
    (generator, step_generator), (judge, step_judge) = ours
    models = Generator(0), discriminator(0)
    optimizers = [make(model.parameters()) for model in models]
    references = [OneProcess(model, comm.world_size) for model in models]
    for step in range(3):
        (real_loss(judge, comm.rank, step) + fake_loss(generator, judge, comm.rank, step, 0)).backward()
        step_judge.step()
        judge.requires_grad_(step != 1 or strategy == "ddp")  # torch refuses to wrap what is all frozen
        fake_loss(generator, judge, comm.rank, step, 1).backward()
        step_generator.step()
        judge.requires_grad_(True)
        step_judge.zero_grad()
        step_generator.zero_grad()

        references[1].backward(lambda m, r, s=step: real_loss(m, r, s) + fake_loss(models[0], m, r, s, 0))
        references[1].average()
        optimizers[1].step()
        references[0].backward(lambda m, r, s=step: fake_loss(m, models[1], r, s, 1))
        references[0].average()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for (module, _), expected, which in zip(ours, models, ("generator", "discriminator"), strict=True):
        assert_as(module.full_state_dict(), expected, f"{strategy}, two models, {name}, {which}")
        module.detach()


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "adamw"), (3, "momentum"), (4, "sgd")])
def test_script_in_shards_ends_with_the_weights_of_one_process(world_size, optimizer):
    cases = [*CASES, "two models"]
    assert set(run_ranks(world_size, trains_as_one, SHARDS, cases, [optimizer], seconds=500)) == {50}


@pytest.mark.long
def test_script_that_averages_ends_with_the_weights_of_one_process():
    cases = ["accumulated", "clipped", "two models"]
    assert set(run_ranks(3, trains_as_one, AVERAGES, cases, ["momentum"], seconds=500)) == {3 * len(AVERAGES)}
