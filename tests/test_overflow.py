"""fp16: a step that overflows on one rank is left out on all and leaves no trace, and the loss scale has an end."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from worlds import run_ranks

from cos598d.comm import hosts
from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.loop import train
from cos598d.measure.record import RunRecord
from cos598d.plan import TrainingSetup
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.precision import FIRST, LossScale
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.codecs import CODECS
from cos598d.sync.options import SyncOptions
from cos598d.terminal.console import Console
from cos598d.tools.check.toy import ToyFeatures, ToyModel, plain_loss, plain_model, toy_model

RANKS = 2
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


def good_averages(comm, name, word, factors, scales, tells=True):
    """On a rank: the unscaled averages of the steps that are taken, (steps, some elements).

    Rank 1's gradient of a step is multiplied by its factor; a step that is not finite then is forgotten, if `tells`.
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
        elif tells:
            sync.forget_step()
        model.zero_grad(set_to_none=True)
    sync.detach()
    return torch.stack(taken)


def compare_averages(comm, name, word):
    """On a rank: how far three steps' averages are off when losses are scaled; when steps overflow in between; and when
    nobody tells the sync of these, as in a script of one's own with torch's GradScaler."""
    hosts.host_groups = lambda comm: [[rank] for rank in range(comm.world_size)]
    plain = good_averages(comm, name, word, [1.0] * 3, [1.0] * 3)
    scaled = good_averages(comm, name, word, [1.0] * 3, [2.0**16, 2.0**3, 2.0**20])
    factors = [math.inf, 1.0, math.inf, math.nan, 1.0, 1.0]
    overflowing = good_averages(comm, name, word, factors, [2.0**16 / 2**step for step in range(6)])
    untold = good_averages(comm, name, word, factors, [1.0] * 6, tells=False)
    return [((found - plain).abs().max() / plain.abs().max()).item() for found in (scaled, overflowing, untold)]


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize(("name", "word"), KINDS)
def test_codecs_keep_nothing_of_a_step_that_overflows_on_one_rank_and_nothing_in_scaled_units(name, word):
    for by_scale, by_overflow, untold in run_ranks(RANKS, compare_averages, name, word):
        assert by_scale < 1e-4
        # int8 rounds by random numbers, of which the bad steps have drawn some.
        assert max(by_overflow, untold) < (0.05 if word == "int8" else 1e-4)


def see_one_ranks_gradient(comm):
    scales = [2.0**10] * 4
    for name in SYNCS:
        if name not in ("none", "local_sgd", "diloco"):
            # It asserts that all ranks see the same.
            good_averages(comm, name, None, [1.0, math.inf, math.nan, 1.0], scales)
    for word in CODECS:
        good_averages(comm, "bucketed", word, [1.0, math.inf, math.nan, 1.0], scales)


def test_what_is_not_finite_on_one_rank_is_so_on_all_under_every_sync():
    run_ranks(3, see_one_ranks_gradient)


class Overflowing(ToyModel):
    """A toy whose gradient overflows on this rank in the forwards that `bad` names, counted from 1 (None: in all)."""

    def prepare(self, bad):
        self.bad, self.forwards = bad, 0
        return self

    def forward(self, **inputs):
        loss, logits = super().forward(**inputs)
        self.forwards += 1
        is_bad = self.bad is None or self.forwards in self.bad
        return Times.apply(loss, math.inf if is_bad else 1.0), logits


class Rates(RunRecord):
    """A record that keeps the learning rates."""

    def iteration(self, facts, seconds, phases, counts=None):
        self.rates = [*getattr(self, "rates", []), facts["learning_rate"]]
        super().iteration(facts, seconds, phases, counts)


def train_toy(comm, model, name, steps=8, precision="fp16", **values):
    """On a rank: train `model`; the record."""
    config = RunConfig(
        do_train=True, sync=name, total_train_batch_size=8, max_steps=steps, learning_rate=0.01, precision=precision,
        warmup_steps=2, **values,
    )  # fmt: skip
    sync = get_sync(name)(comm, options=config.sync_options())
    with tempfile.TemporaryDirectory() as folder, Rates(Path(folder), comm.rank) as record:
        comm.ledger = record.ledger
        strategy = Replicated(sync, precision)
        train(TrainingSetup(config, comm, model, strategy, ToyFeatures(64), record, Console("", speaks=False)), dict)
    comm.ledger = Ledger()
    return record


def rates_of_ranks(comm, name):
    model = toy_model(0)
    model.__class__ = Overflowing
    record = train_toy(comm, model.prepare([7, 8] if comm.rank == 1 else []), name, 10)
    return record.rates


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "bucketed"])
def test_an_overflow_on_one_rank_leaves_the_learning_rates_alike(name):
    rates, others = run_ranks(RANKS, rates_of_ranks, name)
    assert rates == others
    # The first scale is too large for the toy, but by the 7th step that is over.
    assert rates[5] > rates[6] == rates[7] == rates[8] > rates[9], "two steps were left out, and no other"


def overflow_for_ever(comm, name, word):
    model = toy_model(0)
    model.__class__ = Overflowing
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ledger = comm.ledger
    try:
        train_toy(comm, model.prepare(None if comm.rank == 1 else []), name, 40, compress=word)
    except UserError as error:
        comm.ledger = ledger
        return [str(error), all(torch.equal(value, before[key]) for key, value in model.state_dict().items())]
    return ["trained to the end", False]


def overflow_under_each(comm, kinds):
    return [overflow_for_ever(comm, *kind) for kind in kinds]


def test_a_loss_scale_below_1_ends_the_run_in_one_sentence_on_every_rank():
    answers = run_ranks(RANKS, overflow_under_each, [("bucketed", "topk"), ("local_sgd", None), ("ddp", None)])
    assert answers[0] == answers[1]
    for sentence, untouched in answers[0]:
        assert sentence.startswith("the gradients of iteration 17 are not finite in fp16")
        assert "--precision bf16" in sentence
        assert untouched


def agree_locally(comm):
    sync = get_sync("local_sgd")(comm)
    sync.attach(plain_model())
    comm.ledger = Ledger()
    agreed = [sync.agree_on_finite(comm.rank == 0), sync.agree_on_finite(True)]
    return [agreed, [[row.purpose, row.payload_bytes] for row in comm.ledger.rows]]


def test_what_local_sgd_sends_to_agree_is_in_the_ledger():
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


def test_unscaled_gradients_are_divided_by_the_scale_and_looked_at():
    scale, weight = LossScale(is_on=True), torch.nn.Parameter(torch.zeros(3))
    assert scale.unscale([weight])
    weight.grad = torch.full((3,), FIRST)
    assert scale.unscale([weight])
    assert weight.grad.tolist() == [1.0] * 3
    weight.grad[1] = math.nan
    assert not scale.unscale([weight])
    assert LossScale(is_on=False).unscale([weight]), "without fp16 nothing is looked at"
