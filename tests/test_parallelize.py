"""`cos598d.parallelize`: every strategy in a script's own loop ends with the bits of one process on the whole batch."""


import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import run_ranks

import cos598d
from cos598d.sync import SYNCS, get_sync

SHARDS = ["zero1", "zero2", "zero3", "sparse_zero1", "shared_weights"]
EXACT = [*SHARDS, *(name for name in SYNCS if get_sync(name).exact and name != "none")]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
QUANTUM = 12 / 2**20  # gradients are multiples of it: their sums, and a half, a third and a quarter of them, are exact


class Model(nn.Module):
    """An embedding that travels by rows, layers with a tied weight, a frozen one, one that not all use, a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(9001, 31)
        self.frozen = nn.Linear(31, 31).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(31, 31) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight
        self.sometimes = nn.Linear(31, 31)
        self.output = nn.Linear(31, 3)
        self.register_buffer("calls", torch.full((), float(seed)))
        self.checkpoints = None  # or whether they are reentrant
        for p in self.parameters():
            if p.requires_grad:
                p.register_hook(rounded)

    def forward(self, ids, use=False):
        self.calls += 1
        state = self.frozen(self.embedding(ids).mean(dim=1))
        for layer in self.layers:
            state = torch.tanh(
                layer(state) if self.checkpoints is None else checkpoint(layer, state, use_reentrant=self.checkpoints)
            )
        return {"logits": self.output(self.sometimes(state) if use else state)}


def rounded(gradient):
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return torch.sparse_coo_tensor(gradient.indices(), rounded(gradient.values()), gradient.shape)
    return (gradient / QUANTUM).round() * QUANTUM


def loss_of(module, rank, step):
    ids = torch.randint(0, 9001, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return 9 * module(ids, use=rank == 0 and step % 3 == 1)["logits"].square().mean()


class Alone:
    """One process in place of `ranks`: what each of them would add to the gradients, in turn, and then the average."""

    def __init__(self, model, ranks):
        self.module, self.ranks = model, range(ranks)

    def backward(self, *losses):
        for rank in self.ranks:
            for loss in losses:
                loss(self.module, rank).backward()

    def average(self):
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad *= 1 / len(self.ranks)


def plainly(module, optimizer, rank, step):
    loss_of(module, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def plainly_alone(alone, optimizer, step):
    alone.backward(lambda m, r: loss_of(m, r, step))
    alone.average()
    optimizer.step()
    optimizer.zero_grad()


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


def three_parts_alone(alone, optimizer, step):
    alone.backward(*(lambda m, r, part=part: loss_of(m, r, part + step) for part in (50, 60)))
    plainly_alone(alone, optimizer, step)


def reading(module, optimizer, rank, step):
    """A norm, and an average of the weights, as scripts keep one."""
    loss_of(module, rank, step).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    assert torch.allclose(norm, module.clip_grad_norm_(1e9), rtol=1e-5)
    optimizer.step()
    assert sum(p.detach().sum() for p in module.parameters()) is not None


def clipping(module, optimizer, rank, step):
    loss_of(module, rank, step).backward()
    module.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()


def clipping_by_torch(module, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(module, rank, step).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()


def clipping_alone(alone, optimizer, step):
    alone.backward(lambda m, r: loss_of(m, r, step))
    alone.average()
    assert torch.nn.utils.clip_grad_norm_(alone.module.parameters(), 0.5) > 0.5, "nothing was clipped"
    optimizer.step()
    optimizer.zero_grad()


def by_closure(module, optimizer, rank, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(module, rank, step)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


# By name: what a rank does in a step, what one process does, whether the bits are the same, and how models are set.
CASES = {
    "plain": (plainly, plainly_alone, True, None),
    "accumulated": (accumulating, three_parts_alone, True, None),
    "added": (adding, three_parts_alone, True, None),
    "read": (reading, plainly_alone, True, None),
    "closure": (by_closure, plainly_alone, True, None),
    "clipped": (clipping, clipping_alone, False, None),
    "clipped by torch": (clipping_by_torch, clipping_alone, False, None),
    "checkpointed": (plainly, plainly_alone, True, False),
    "checkpointed, reentrant": (plainly, plainly_alone, True, True),
}


def assert_as(state, model, what, exactly=True):
    for name, expected in model.named_parameters():
        worst = (state[name] - expected).abs().max().item()
        assert worst <= (0 if exactly else 2e-6), f"{what}: {name} is off by {worst:.1e}"


def trains_as_one(comm, strategy, steps=3):
    """Every case under every optimizer; how many there were."""
    for case, (ours, theirs, exactly, checkpoints) in CASES.items():
        for name, make in OPTIMIZERS.items():
            model, expected = Model(comm.rank), Model(0)
            model.checkpoints = expected.checkpoints = checkpoints
            module, optimizer = cos598d.parallelize(model, make, strategy)
            assert isinstance(optimizer, torch.optim.Optimizer)
            alone, single = Alone(expected, comm.world_size), make(expected.parameters())
            for step in range(steps):
                ours(module, optimizer, comm.rank, step)
                theirs(alone, single, step)
            assert_as(module.full_state_dict(), expected, f"{strategy}, {case}, {name}", exactly)
            module.detach()
    return len(CASES) * len(OPTIMIZERS)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("strategy", EXACT)
def test_a_script_ends_with_the_weights_of_one_process(strategy, world_size):
    assert set(run_ranks(world_size, trains_as_one, strategy)) == {27}
