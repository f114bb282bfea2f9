"""The loop calls a strategy by its contract, times it from outside, and accepts any that keeps the contract."""

import contextlib
import math
import tempfile
from pathlib import Path

import pytest
import torch
from worlds import run_ranks

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.data.sampler import micro_batches
from cos598d.loop import step, train
from cos598d.measure.clock import IterationClock
from cos598d.measure.record import RunRecord
from cos598d.plan import TrainingSetup
from cos598d.records.conventions import LOSS
from cos598d.strategies.base import Strategy
from cos598d.strategies.observed import TimedStrategy
from cos598d.strategies.optimizers import SCHEDULERS, make_optimizer, schedule
from cos598d.strategies.replicated import Replicated
from cos598d.sync import get_sync
from cos598d.terminal.console import Console
from cos598d.tools.exam.models import toy_model
from toy_features import ToyFeatures

STEPS = 5


class Diary(Strategy):
    """Writes down what it is asked to do."""

    def __init__(self):
        self.said = []

    @contextlib.contextmanager
    def no_sync(self):
        self.said.append("no_sync")
        yield
        self.said.append("end of no_sync")

    def backward(self, loss):
        self.said.append(("backward", loss))

    def finish(self):
        self.said.append("finish")

    def clip(self, max_norm):
        self.said.append(("clip", max_norm))

    def step(self):
        self.said.append("step")
        return "its word"


def test_a_step_weights_losses_finishes_after_the_last_and_then_clips():
    features, diary = ToyFeatures(8), Diary()
    parts = micro_batches(torch.arange(8).numpy(), features.lengths, 0, 1, 2, group_by_length=False)
    losses = {0: (3.0,), 4: (5.0, "logits")}
    returned = step(diary, lambda first: losses[first], parts, lambda part: {"first": int(part.indices[0])}, 0.7)
    micro_steps = ["no_sync", ("backward", 1.5), "end of no_sync", ("backward", 2.5)]
    assert diary.said == [*micro_steps, "finish", ("clip", 0.7), "step"]
    assert returned == "its word"


def trained(comm, strategy, model=None, **values):
    """Train the toy for some steps; its record, in whose `rows` the iterations are as the loop gave them."""
    config = RunConfig(
        do_train=True, total_train_batch_size=8, max_steps=STEPS, learning_rate=0.01, weight_decay=0.1,
        max_grad_norm=0.3, adam_epsilon=1e-3, **values,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Rows(Path(folder), comm.rank) as record:
        comm.ledger = record.ledger
        console = Console("", speaks=False)
        train(TrainingSetup(config, comm, model or toy_model(0), strategy, ToyFeatures(64), record, console), dict)
        return record


class Rows(RunRecord):
    """A record that keeps its rows, and those of the ledger."""

    @property
    def losses(self):
        return [row["loss"] for row in self.rows]

    def __enter__(self):
        self.rows, self.calls = [], []
        return super().__enter__()

    def iteration(self, facts, seconds, phases, counts=None):
        self.rows.append(facts | {"seconds": seconds, "phases": phases})
        self.calls += self.ledger.rows
        super().iteration(facts, seconds, phases, counts)


def alone():
    return Communicator(None, "gloo", torch.device("cpu"))


@pytest.mark.parametrize(("precision", "agreement"), [("fp32", []), ("fp16", ["sync"])])
def test_an_iteration_has_its_phases_in_order(precision, agreement):
    comm = alone()
    strategy = Replicated(get_sync("all_reduce")(comm), precision)
    record = trained(comm, strategy, precision=precision, gradient_accumulation_steps=2)
    for row in record.rows:
        names = [name for name, *_ in row["spans_seconds"]]
        micro_steps = names.count("backward")
        assert micro_steps > 1
        of_parts = ["data", "forward", "backward"] * micro_steps
        assert names == ["data", *of_parts, "sync", "clip", *agreement, "step", "sync"]
        assert sum(row["phases"].values()) <= row["seconds"]


def when_the_loss_travels(comm):
    record = trained(comm, Replicated(get_sync("all_reduce")(comm)), gradient_accumulation_steps=2)
    found = []
    for row in record.rows:
        (loss,) = [call for call in record.calls if call.purpose == LOSS and call.iteration == row["iteration"]]
        backward = max(started for name, started, _ in row["spans_seconds"] if name == "backward")
        finish = min(started for name, started, _ in row["spans_seconds"] if name == "sync")
        found.append(loss.started <= backward < finish <= loss.started + loss.seconds)
    return [found, record.losses]


def test_the_loss_s_all_reduce_overlaps_the_last_backward():
    (on_time, losses), (_, others) = run_ranks(2, when_the_loss_travels)
    assert on_time == [True] * STEPS
    assert losses == others


def norms_of(comm, name):
    """The norms that `clip` gives, with a limit and without one, and what they are of the averages afterwards."""
    model = toy_model(0)
    strategy = Replicated(get_sync(name)(comm))
    config = RunConfig(learning_rate=0.0)
    module = strategy.attach(model, lambda named: make_optimizer(named, config))
    found = []
    for limit in (0.3, 0.0):
        strategy.backward(module(**ToyFeatures(4, seed=comm.rank).collate(torch.arange(4).numpy()))[0])
        strategy.finish()
        before = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        norm = strategy.clip(limit)
        after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        found.append([before, None if norm is None else norm.item(), after])
        assert strategy.step()
        assert all(p.grad is None for p in model.parameters() if p.requires_grad)
    strategy.detach()
    return found


def test_clip_returns_the_norm_before_clipping_and_0_is_no_limit():
    first, second = run_ranks(2, norms_of, "bucketed")
    assert first == second
    (before, norm, after), unlimited = first
    assert norm == pytest.approx(before)
    assert norm > 1
    assert after == pytest.approx(0.3)
    assert unlimited == [pytest.approx(before), None, unlimited[0]]


class Divided(Strategy):
    """Every rank steps every n-th parameter and holds the optimizer's state of those alone."""

    def __init__(self, comm):
        self.comm = comm

    def attach(self, model, make_optimizer):
        self._sync = get_sync("all_reduce")(self.comm)
        module = self._sync.attach(model)
        self._owned = list(enumerate((n, p) for n, p in model.named_parameters() if p.requires_grad))
        mine = [named for place, named in self._owned if place % self.comm.world_size == self.comm.rank]
        self.optimizer = make_optimizer(mine)
        return module

    def backward(self, loss):
        (loss * self.comm.world_size).backward()

    def finish(self):
        self._sync.finish()

    def clip(self, max_norm):
        return torch.nn.utils.clip_grad_norm_([p for _, (_, p) in self._owned], max_norm)

    def step(self):
        with self.phase("step"):
            self.optimizer.step()
        with self.phase("sync"):
            for place, (name, p) in self._owned:
                self.comm.broadcast(p.data, name, root=place % self.comm.world_size)
                p.grad = None
        return True


def train_divided(comm):
    """The losses and weights of a strategy that divides the work, the replicas' beside them, and its state's size."""
    found = []
    for strategy in (Divided(comm), Replicated(get_sync("all_reduce")(comm))):
        model = toy_model(comm.rank)
        record = trained(comm, strategy, model)
        weights = {name: p.detach().flatten().tolist()[:99] for name, p in model.named_parameters()}
        found.append([record.losses, weights, len(strategy.optimizer.state)])
    return found


def test_a_strategy_that_divides_the_optimizer_trains_as_replicas_do():
    """Names decide whose weights decay, so a rank that steps a few of them has to be told their names."""
    for (losses, weights, states), (expected, whole, all_states) in run_ranks(2, train_divided):
        assert losses == pytest.approx(expected, rel=1e-6)
        for name, values in whole.items():
            assert weights[name] == pytest.approx(values, rel=1e-6), name
        assert 0 < states < all_states


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("linear", [0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0.0]),
        ("constant", [0.0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ("cosine", [0.0, 0.25, 0.5, 0.25 + 0.25 * math.sqrt(0.5), 0.25, 0.25 - 0.25 * math.sqrt(0.5), 0.0]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(kind, rates):
    assert [schedule(kind, 0.5, 2, 6)(done) for done in range(7)] == pytest.approx(rates)
    assert schedule(kind, 0.5, 0, 1)(0) == 0.5


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_run_records_the_learning_rates_of_its_schedule(kind):
    comm = alone()
    record = trained(comm, Replicated(get_sync("none")(comm)), lr_scheduler=kind, warmup_steps=1)
    rate = schedule(kind, 0.01, 1, STEPS)
    assert [row["learning_rate"] for row in record.rows] == [rate(done) for done in range(STEPS)]


def votes_of(comm):
    """The sums of the ranks' votes and the losses, of iterations in which the ranks vote differently."""
    strategy = Replicated(get_sync("all_reduce")(comm))
    clock = IterationClock(comm.device)
    numbers = iter(range(3))
    observed = TimedStrategy(strategy, clock, comm, lambda: (comm.rank, next(numbers)))
    module = observed.attach(toy_model(0), lambda named: make_optimizer(named, RunConfig(learning_rate=0.0)))
    features, found = ToyFeatures(8), []
    for number in range(1, 4):
        parts = micro_batches(torch.arange(8).numpy(), features.lengths, comm.rank, comm.world_size, 2, False)
        with observed.iteration(number):
            step(observed, module, parts, lambda part: features.collate(part.indices), 0.0)
        found.append([observed.loss, observed.counted])
    strategy.detach()
    return found


def test_votes_are_summed_with_the_loss_and_do_not_change_it():
    first, second = run_ranks(2, votes_of)
    assert first == second
    assert [votes for _, votes in first] == [[1, 0], [1, 2], [1, 4]]
    (loss,) = {loss for loss, _ in first}
    with torch.no_grad():
        (expected, *_) = toy_model(0)(**ToyFeatures(8).collate(torch.arange(8).numpy()))
    assert loss == pytest.approx(expected.item())
