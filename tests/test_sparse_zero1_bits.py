"""sparse_zero1's bits: DDP's, where no sum is rounded; and all ranks', unless somebody has changed a copy by hand."""

import tempfile
from pathlib import Path

import pytest
import torch
from states import digest
from torch import nn
from worlds import run_ranks

from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.measure.record import RunRecord
from cos598d.plan import TrainingSetup
from cos598d.strategies import get_strategy
from cos598d.strategies.parts import low_bytes, row_gradients
from cos598d.strategies.sparse_zero1 import SparseZero1
from cos598d.sync.options import SyncOptions
from cos598d.terminal.console import Console
from cos598d.tools.check.toy import ToyFeatures, toy_model
from cos598d.train import train

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
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        ids = torch.randint(0, 300 * (step + 1), (4, 8), generator=generator)
        strategy.backward(module(ids=ids, step=step, rank=comm.rank)[0] / comm.world_size)
        strategy.finish()
        strategy.clip(0.0)
        strategy.step()
    strategy.settle()
    found = {name: digest(p.data) for name, p in model.named_parameters()}
    strategy.detach()
    return found


def bits_of_each(comm, rate):
    return {name: bits_of(comm, name, rate) for name in ("ddp", "zero1", "sparse_zero1")}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rate", [1.0, 1e-3])
def test_where_no_sum_is_rounded_the_weights_are_ddp_s_to_the_last_bit_however_long_the_steps_are(ranks, rate):
    """Elsewhere AdamW makes as long a step of a gradient that is nothing but rounding as of any other."""
    for found in run_ranks(ranks, bits_of_each, rate):
        assert found["sparse_zero1"] == found["zero1"] == found["ddp"]


class Meddled(SparseZero1):
    """After the second step somebody changes a weight's sign in rank 1's copy."""

    steps = 0

    def step(self):
        is_good = super().step()
        self.steps += 1
        if (self.steps, self.comm.rank) == (2, 1):
            with self.whole():
                self.model.get_parameter("larger").data.neg_()
        return is_good


def train_meddled(comm, kind, check_every):
    """On a rank: what ends a training of eight steps, and how many parts of weights travel by their lower bytes."""
    row_gradients.LEAST_BYTES, low_bytes.LEAST_ELEMENTS = 100, 1
    values = {"total_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 1e-4, "check_replicas": check_every}
    config = RunConfig(do_train=True, sync="sparse_zero1", **values)
    strategy = kind(comm, True, config.sync_options())
    with tempfile.TemporaryDirectory() as folder, RunRecord(Path(folder), comm.rank) as record:
        try:
            console = Console("", speaks=False)
            train(TrainingSetup(config, comm, toy_model(0), strategy, ToyFeatures(64), record, console), dict)
        except UserError as error:
            return [str(error), len(strategy._packed)]
    return ["trained to the end", len(strategy._packed)]


def train_meddled_with_each(comm, checks):
    return [train_meddled(comm, SparseZero1, 1), *(train_meddled(comm, Meddled, check) for check in checks)]


def test_a_copy_that_somebody_has_changed_is_found_when_the_replicas_are_compared_and_not_mended_before():
    """The highest bytes of the weights are taken to be known: neither do the changed ones travel, nor the others' to
    where they were changed."""
    answers = run_ranks(2, train_meddled_with_each, [1, 3, 0])
    assert answers[0] == answers[1]
    (alone, _), *others = answers[0]
    assert alone == "trained to the end"
    for (sentence, packed), told_after in zip(others, (2, 3, 8), strict=True):
        start = f"the replicas differ after iteration {told_after}: on rank 1 larger is off rank 0's"
        assert sentence.startswith(start)
        assert packed > 0
