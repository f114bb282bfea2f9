"""fp16: the same steps overflow under every strategy, so that their weights can be compared."""

import pytest
import torch
from compared import step_by
from torch import nn
from worlds import run_ranks

from cos598d.strategies import get_strategy
from cos598d.sync.options import SyncOptions

NAMES = ("ddp", "bucketed", "zero1", "sparse_zero1", "zero2", "zero3", "shared_weights")


class Deep(nn.Module):
    """A large embedding and layers whose gradients overflow until the loss scale has been halved a few times."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(2400, 64)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, ids):
        state = self.words(ids).mean(dim=1)
        for layer in self.layers:
            state = torch.tanh(layer(state))
        return ((state.float() * 3).square().sum(),)


def make_sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.1)


def make_adamw(named):
    return torch.optim.AdamW([p for _, p in named], lr=0.01, eps=0.01, weight_decay=0.1, fused=True)


def train(comm, name, make, steps=12):
    """On a rank: which steps counted, and the weights at the end."""
    model = Deep()
    options = SyncOptions(bucket_mb=0.02, first_bucket_mb=0.01)
    strategy = get_strategy(name)(comm, False, options, "fp16")
    module = strategy.attach(model, make)

    def loss_of(module, rank, step, micro):
        ids = torch.randint(1, 2400, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        return module(ids=ids)[0]

    counted = [step_by(strategy, module, comm, step, loss_of, max_norm=1.0)[1] for step in range(steps)]
    strategy.settle()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    strategy.detach()
    return counted, weights


def compare(comm, make):
    """On a rank: by strategy which steps counted, and how far the weights end from DDP's."""
    found = {name: train(comm, name, make) for name in NAMES}
    _, weights = found["ddp"]
    return {name: [counted, (other - weights).abs().max().item()] for name, (counted, other) in found.items()}


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", [make_sgd, make_adamw])
def test_the_same_steps_overflow_under_every_strategy_and_the_weights_are_alike(make, ranks):
    """Scaled by another factor, gradients would overflow in another number of steps, which are lost to the training."""
    for found in run_ranks(ranks, compare, make):
        counted, _ = found["ddp"]
        assert 2 <= counted.count(False) <= 8, "else there is nothing to compare"
        for name, (steps, apart) in found.items():
            assert steps == counted, name
            assert apart < 1e-4, name
