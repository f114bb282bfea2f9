"""A step of several backward passes, in any order and without `no_sync`, leaves the mean of all that was added."""

import pytest
import torch
from torch import nn
from worlds import run_ranks

from cos598d.sync import get_sync
from cos598d.sync.options import SyncOptions

WORDS = 70_000  # of 4 numbers each: more than 1 MiB, so that sparse_rows sends rows of it
# f: a forward of micro-batch k, b: its backward; n, s: from here on under no_sync, or no longer.
ORDERS = {
    "one after the other": "f0 b0 f1 b1",
    "both forwards first": "f0 f1 b0 b1",
    "three": "f0 b0 f1 b1 f2 b2",
    "one under no_sync": "f0 b0 n f1 b1 s f2 b2",
    "the last under no_sync": "f0 b0 n f1 b1 s",
}
# Whether `sometimes` is used, by rank and micro-batch in turn.
USES = ([True], [False], [True, False, False])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.hidden = nn.Linear(4, 30)
        self.sometimes = nn.Linear(30, 30)
        self.output = nn.Linear(30, 7)

    def forward(self, ids, uses):
        state = torch.tanh(self.hidden(self.words(ids).mean(dim=1)))
        return self.output(torch.tanh(self.sometimes(state)) if uses else state).square().mean()


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def batch(rank, number):
    return torch.randint(0, WORDS, (5, 3), generator=torch.Generator().manual_seed(10 * number + rank))


def several_backwards(comm, name):
    """On a rank: what is off the mean by more than rounding."""
    wrong = []
    for order, words in ORDERS.items():
        for uses in USES:
            options = SyncOptions(bucket_mb=500 / 2**20, first_bucket_mb=250 / 2**20)
            mine = model()
            sync = get_sync(name)(comm, options=options)
            module = sync.attach(mine)
            for step in range(2):
                numbers = _do(sync, module, comm.rank, words, 10 * step, uses)
                sync.finish()
                expected = model()
                for rank in range(comm.world_size):
                    for k in numbers:
                        loss = expected(batch(rank, 10 * step + k), uses[(rank + k) % len(uses)])
                        (loss / comm.world_size).backward()
                wrong += [f"{order}, {uses}, step {step}: {each}" for each in _off(mine, expected)]
                mine.zero_grad(set_to_none=True)
            sync.detach()
    return wrong


def _do(sync, module, rank, words, first, uses):
    losses, under = {}, None
    for word in words.split():
        if word == "n":
            under = sync.no_sync()
            under.__enter__()
        elif word == "s":
            under.__exit__(None, None, None)
        elif word[0] == "f":
            k = int(word[1])
            losses[k] = module(batch(rank, first + k), uses[(rank + k) % len(uses)])
        else:
            losses[int(word[1])].backward()
    return list(losses)


def _off(mine, expected):
    for (name, p), e in zip(mine.named_parameters(), expected.parameters(), strict=True):
        if (p.grad is None) != (e.grad is None):
            yield f"{name}: {p.grad} and not {e.grad}"
        elif p.grad is not None and not (p.grad - e.grad).abs().max() < 1e-5 * e.grad.abs().max():
            yield f"{name} by {(p.grad - e.grad).abs().max():.1e}"


@pytest.mark.long(one_in=5)
@pytest.mark.parametrize("name", ["bucketed", "overlap", "shared_memory", "hierarchical", "sparse_rows"])
def test_step_of_several_backward_passes_leaves_the_mean_of_all(name):
    assert run_ranks(3, several_backwards, name) == [[], [], []]
