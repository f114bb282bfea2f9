"""Gradients that share one memory train as if each had its own.

In a.view(24) + b.view(24) autograd passes the sum's gradient on: a and b get two views of it.
"""

import pytest
import torch
from compared import ONE_EACH, distance, sgd, step_by
from torch import nn
from worlds import run_ranks

from cos598d.strategies.replicated import Replicated
from cos598d.strategies.shared_weights import SharedWeights
from cos598d.strategies.zero1 import Zero1
from cos598d.strategies.zero2 import Zero2
from cos598d.strategies.zero3 import Zero3
from cos598d.sync import get_sync
from cos598d.sync.options import SyncOptions

SIZE, STEPS, PARTS, CLIP = 24, 3, 3, 0.5
ALL_TOGETHER = SyncOptions()


class Sharing(nn.Module):
    """Two weights whose gradients are one tensor, which backward also needs for a third."""

    def __init__(self):
        super().__init__()
        self.below, self.flat = nn.Parameter(torch.randn(SIZE)), nn.Parameter(torch.randn(SIZE))
        self.square = nn.Parameter(torch.randn(4, SIZE // 4))

    def forward(self, factors):
        total = torch.tanh(self.below) + self.flat.view(SIZE) + self.square.view(SIZE)
        return (total * factors).square().sum()


def sharing():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sharing()


def factors(step, part, rank):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def train_alone(ranks):
    """The model after training by one process, with a separate sum for each gradient."""
    model = sharing()
    optimizer = sgd(model.named_parameters())
    for step in range(STEPS):
        for part in range(PARTS):
            for rank in range(ranks):
                loss = model(factors(step, part, rank)) / (ranks * PARTS)
                for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                    p.grad = gradient.clone() if p.grad is None else p.grad + gradient
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > 2 * CLIP
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(comm, strategy):
    """The distance of a strategy's weights from those of one process."""
    model, right = sharing(), train_alone(comm.world_size)
    module = strategy.attach(model, sgd)

    def loss_of(module, rank, step, part):
        return module(factors(step, part, rank))

    for step in range(STEPS):  # the second backward without no_sync finds what the first is still sending
        step_by(strategy, module, comm, step, loss_of, PARTS, CLIP, unsynced=1)
    strategy.settle()
    apart = distance(model, right)
    strategy.detach()
    return apart


def train_all(comm):
    found = {}
    for word, options in (("each a bucket", ONE_EACH), ("one bucket", ALL_TOGETHER)):
        for kind in (Zero1, Zero2, Zero3, SharedWeights):
            found[f"{kind.__name__}, {word}"] = train(comm, kind(comm, True, options))
        for name in ("all_reduce", "overlap", "bucketed", "shared_memory", "sparse_rows", "ddp"):
            found[f"{name}, {word}"] = train(comm, Replicated(get_sync(name)(comm, True, options)))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_in_one_memory_train_as_separate_ones(ranks):
    for found in run_ranks(ranks, train_all):
        assert {name: apart for name, apart in found.items() if apart > 1e-5} == {}
