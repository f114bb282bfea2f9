"""sparse_zero1's bits: DDP's, where no sum is rounded."""

import pytest
import torch
from beside import step_by
from states import digest
from torch import nn
from worlds import run_ranks

from cos598d.strategies import get_strategy
from cos598d.sync.options import SyncOptions

ROWS, WIDTH = 2400, 64  # an embedding of which rows travel


def eighths(shape, *seed):
    """Few bits: sums of such numbers are not rounded."""
    generator = torch.Generator().manual_seed(sum(part * 1000**place for place, part in enumerate(seed)))
    return torch.randint(-8, 9, shape, generator=generator) / 8


class Layer(nn.Module):
    """A loss of its own, linear in its weights."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(128, 128)), nn.Parameter(torch.randn(128))

    def forward(self, *seed):
        return sum((p * eighths(p.shape, *seed)).sum() for p in self.parameters())


class Exact(nn.Module):
    """A loss whose gradients are eighths, whatever the weights are."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(ROWS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids, step, rank):
        loss = (self.words(ids) * eighths((*ids.shape, 1), step, rank, 9)).sum()
        return (loss + sum(layer(step, rank, place) for place, layer in enumerate(self.layers)),)


def bits_of(comm, name, rate):
    """On a rank: digests of the weights after six steps of AdamW."""
    model = Exact()
    strategy = get_strategy(name)(comm, False, SyncOptions(bucket_mb=0.1, first_bucket_mb=0.1), "fp32")
    module = strategy.attach(model, lambda named: torch.optim.AdamW([p for _, p in named], lr=rate, fused=True))

    def loss_of(module, rank, step, micro):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 300 * (step + 1), (4, 8), generator=generator)
        return module(ids=ids, step=step, rank=rank)[0]

    for step in range(6):
        step_by(strategy, module, comm, step, loss_of)
    strategy.settle()
    found = {name: digest(p.data) for name, p in model.named_parameters()}
    strategy.detach()
    return found


def bits_of_each(comm, rate):
    return {name: bits_of(comm, name, rate) for name in ("ddp", "zero1", "sparse_zero1")}


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rate", [1.0, 1e-3])
def test_where_no_sum_is_rounded_the_weights_are_ddp_s_to_the_last_bit_however_long_the_steps_are(ranks, rate):
    """Elsewhere AdamW makes as long a step of a gradient that is nothing but rounding as of any other."""
    for found in run_ranks(ranks, bits_of_each, rate):
        assert found["sparse_zero1"] == found["zero1"] == found["ddp"]
