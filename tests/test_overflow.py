"""fp16: a step that overflows on one rank is skipped on all, under every strategy, and leaves no trace."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from compared import step_by
from torch import nn
from worlds import run_ranks

from cos598d.comm import hosts
from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.loop import train
from cos598d.measure.record import RunRecord
from cos598d.plan import TrainingSetup
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies import get_strategy
from cos598d.strategies.precision import FIRST, LossScale
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.codecs import CODECS
from cos598d.sync.options import SyncOptions
from cos598d.terminal.console import Console
from cos598d.tools.exam.models import ToyModel, plain_loss, plain_model, toy_model
from toy_features import ToyFeatures

RANKS = 2
STRATEGIES = ("ddp", "bucketed", "zero1", "sparse_zero1", "zero2", "zero3", "shared_weights")
KINDS = (
    ("bucketed", "topk:0.1"), ("bucketed", "powersgd"), ("ring", "topk:0.1"), ("hierarchical", "topk:0.1"),
    ("tree", "powersgd"), ("bucketed", "int8"),
)  # fmt: skip


class Times(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(context, tensor, factor):
        context.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


def good_averages(comm, name, word, factors, scales, forgets=True):
    """On a rank: the unscaled averages of the steps that are taken, (steps, some elements).

    Rank 1's gradient of a step is multiplied by its factor; a step that is not finite then is forgotten, if `forgets`.
    """
    model = plain_model()
    sync = get_sync(name)(comm, find_unused_parameters=False, options=SyncOptions(compress=word, bucket_mb=0.5))
    module = sync.attach(model)
    taken = []
    for factor, scale in zip(factors, scales, strict=True):
        sync.loss_scale = scale
        loss = Times.apply(plain_loss(module, comm.rank, len(taken)), factor if comm.rank == 1 else 1.0)
        (loss * scale).backward()
        sync.finish()
        average = torch.cat([p.grad.flatten() for p in model.parameters()]) / scale
        finite = comm.exchange(bool(average.isfinite().all()))
        assert finite == [math.isfinite(factor)] * comm.world_size, "not all ranks see what one rank's gradient is"
        if finite[0]:
            taken.append(average[::97])
            sync.after_step()
        elif forgets:
            sync.forget_step()
        model.zero_grad(set_to_none=True)
    sync.detach()
    return torch.stack(taken)


def compare_averages(comm, name, word):
    """On a rank: how far three steps' averages are off when losses are scaled; when steps overflow in between; and when
    the sync is not told, as in your own script with torch's GradScaler."""
    hosts.host_groups = lambda comm: [[rank] for rank in range(comm.world_size)]
    plain = good_averages(comm, name, word, [1.0] * 3, [1.0] * 3)
    scaled = good_averages(comm, name, word, [1.0] * 3, [2.0**16, 2.0**3, 2.0**20])
    factors = [math.inf, 1.0, math.inf, math.nan, 1.0, 1.0]
    overflowing = good_averages(comm, name, word, factors, [2.0**16 / 2**step for step in range(6)])
    untold = good_averages(comm, name, word, factors, [1.0] * 6, forgets=False)
    return [((found - plain).abs().max() / plain.abs().max()).item() for found in (scaled, overflowing, untold)]


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize(("name", "word"), KINDS)
def test_codecs_keep_no_scaled_value_and_nothing_of_a_step_that_overflows(name, word):
    for by_scale, by_overflow, untold in run_ranks(RANKS, compare_averages, name, word):
        assert by_scale < 1e-4
        # int8 rounds by random numbers, of which the bad steps have drawn some.
        assert max(by_overflow, untold) < (0.05 if word == "int8" else 1e-4)


def see_one_ranks_gradient(comm):
    syncs = [(name, None) for name in SYNCS if name not in ("none", "local_sgd", "diloco")]
    for name, word in [*syncs, *(("bucketed", word) for word in CODECS)]:
        # It asserts that all ranks see the same.
        good_averages(comm, name, word, [1.0, math.inf, math.nan, 1.0], [2.0**10] * 4)


def test_every_sync_shows_all_ranks_a_value_that_is_not_finite_on_one():
    run_ranks(3, see_one_ranks_gradient)


class Overflowing(ToyModel):
    """A toy whose gradient overflows on this rank in the forwards that `bad` names, counted from 1 (None: in all)."""

    def forward(self, **inputs):
        loss, logits = super().forward(**inputs)
        self.forwards += 1
        is_bad = self.bad is None or self.forwards in self.bad
        return Times.apply(loss, math.inf if is_bad else 1.0), logits


def overflowing_toy(bad):
    model = toy_model(0)
    model.__class__ = Overflowing
    model.bad, model.forwards = bad, 0
    return model


class Rates(RunRecord):
    """A record that keeps the learning rates."""

    def iteration(self, facts, seconds, phases, counts=None):
        self.rates = [*getattr(self, "rates", []), facts["learning_rate"]]
        super().iteration(facts, seconds, phases, counts)


def train_toy(comm, model, name, steps, **values):
    """On a rank: train `model`; the learning rates."""
    config = RunConfig(
        do_train=True, sync=name, total_train_batch_size=8, max_steps=steps, learning_rate=0.01, precision="fp16",
        warmup_steps=2, **values,
    )  # fmt: skip
    sync = get_sync(name)(comm, options=config.sync_options())
    with tempfile.TemporaryDirectory() as folder, Rates(Path(folder), comm.rank) as record:
        comm.ledger = record.ledger
        strategy = Replicated(sync, "fp16")
        setup = TrainingSetup(config, comm, model, strategy, ToyFeatures(64), record, Console("", speaks=False))
        try:
            train(setup, dict)
        finally:
            comm.ledger = Ledger()
        return record.rates


def rates_under_each(comm, names):
    return [train_toy(comm, overflowing_toy([7, 8] if comm.rank == 1 else []), name, 10) for name in names]


def test_learning_rates_stay_equal_after_an_overflow_on_one_rank():
    names = ["local_sgd", "diloco", "bucketed"]
    found, others = run_ranks(RANKS, rates_under_each, names)
    assert found == others
    for name, rates in zip(names, found, strict=True):
        # The first scale is too large for the toy, but by the 7th step that is over.
        assert rates[5] > rates[6] == rates[7] == rates[8] > rates[9], f"{name}: two steps are skipped, and no other"


def overflow_in_every_step(comm, kinds):
    """On a rank: of each sync and codec the run's error, and whether the weights are those of the start."""
    found = []
    for name, word in kinds:
        model = overflowing_toy(None if comm.rank == 1 else [])
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(UserError) as error:
            train_toy(comm, model, name, 40, compress=word)
        unchanged = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        found.append([str(error.value), unchanged])
    return found


def test_a_loss_scale_below_1_ends_the_run_with_the_same_error_on_every_rank():
    answers = run_ranks(RANKS, overflow_in_every_step, [("bucketed", "topk"), ("local_sgd", None), ("ddp", None)])
    assert answers[0] == answers[1]
    for sentence, unchanged in answers[0]:
        assert sentence.startswith("the gradients of iteration 17 are not finite in fp16")
        assert "--precision bf16" in sentence
        assert unchanged


def agree_locally(comm):
    sync = get_sync("local_sgd")(comm)
    sync.attach(plain_model())
    comm.ledger = Ledger()
    agreed = [sync.agree_on_finite(comm.rank == 0), sync.agree_on_finite(True)]
    return [agreed, [[row.purpose, row.payload_bytes] for row in comm.ledger.rows]]


def test_the_ledger_has_what_local_sgd_sends_to_agree():
    for agreed, rows in run_ranks(RANKS, agree_locally):
        assert agreed == [False, True]
        assert rows == [[AGREEMENT, 4]] * 2


def test_a_loss_scale_doubles_after_2000_good_steps_and_halves_at_once():
    scale = LossScale(is_on=True)
    for step in range(2000):
        assert scale.value == FIRST
        scale.update(True, step)
    assert scale.value == 2 * FIRST
    scale.update(False, 2000)
    assert scale.value == FIRST
    for step in range(1999):
        scale.update(True, step)
    assert scale.value == FIRST


def test_unscale_divides_gradients_and_finds_those_that_are_not_finite():
    scale, weight = LossScale(is_on=True), torch.nn.Parameter(torch.zeros(3))
    assert scale.unscale([weight])
    weight.grad = torch.full((3,), FIRST)
    assert scale.unscale([weight])
    assert weight.grad.tolist() == [1.0] * 3
    weight.grad[1] = math.nan
    assert not scale.unscale([weight])
    assert LossScale(is_on=False).unscale([weight]), "without fp16 nothing is looked at"


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


def steps_and_weights(comm, name, make):
    """On a rank: which steps counted, and the weights at the end."""
    model = Deep()
    options = SyncOptions(bucket_mb=0.02, first_bucket_mb=0.01)
    strategy = get_strategy(name)(comm, False, options, "fp16")
    module = strategy.attach(model, make)

    def loss_of(module, rank, step, micro):
        ids = torch.randint(1, 2400, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        return module(ids=ids)[0]

    counted = [step_by(strategy, module, comm, step, loss_of, max_norm=1.0)[1] for step in range(12)]
    strategy.settle()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    strategy.detach()
    return counted, weights


def compare(comm, make):
    """On a rank: by strategy which steps counted, and how far the weights end from DDP's."""
    found = {name: steps_and_weights(comm, name, make) for name in STRATEGIES}
    _, weights = found["ddp"]
    return {name: [counted, (other - weights).abs().max().item()] for name, (counted, other) in found.items()}


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", [make_sgd, make_adamw])
def test_the_same_steps_overflow_under_every_strategy_with_equal_weights(make, ranks):
    """Scaled by another factor, gradients would overflow in another number of steps, which are lost to the training."""
    for found in run_ranks(ranks, compare, make):
        counted, _ = found["ddp"]
        assert 2 <= counted.count(False) <= 8, "else there is nothing to compare"
        for name, (steps, apart) in found.items():
            assert steps == counted, name
            assert apart < 1e-4, name
