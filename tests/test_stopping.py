"""Which steps a run has, where it is evaluated, and what ends it before its last step, on all ranks."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
from lives import rows_of
from programs import TINY, script
from torch.distributed import HashStore

from cos598d.checkpoint_flags import CheckpointFlags
from cos598d.checkpoints.control import EarlyStopping, Stopping
from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.plan import Plan, Position
from cos598d.terminal.signals import ENDING, Requests, is_noted
from cos598d.tools.report.load import load_run

EXAMPLES = 10
QUIET = [0.0] * len(Stopping.VOTES)


def plan_of(**values):
    return Plan(RunConfig(total_train_batch_size=4, **values), EXAMPLES, 1)


def drawn(plan, after=0):
    return [(epoch, batch.tolist()) for epoch, batch in plan.batches(after)]


@pytest.mark.parametrize("values", [{"num_train_epochs": 2.5}, {"max_steps": 7}, {"max_steps": 1}, {}], ids=str)
def test_a_resumed_training_has_the_batches_of_one_that_nothing_stopped(values):
    plan = plan_of(**values)
    whole = drawn(plan)
    assert len(whole) == plan.steps
    for after in range(plan.steps + 2):
        assert drawn(plan, after) == whole[after:]


def test_every_whole_epoch_has_each_example_once():
    whole = drawn(plan_of(num_train_epochs=2.5))
    assert [epoch for epoch, _ in whole] == [1, 1, 1, 2, 2, 2, 3, 3]
    for epoch in (1, 2):
        seen = np.concatenate([batch for its, batch in whole if its == epoch])
        assert sorted(seen) == list(range(EXAMPLES))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_train_epochs": 2}, [3, 6]),
        ({"max_steps": 5}, [3, 5]),
        ({"max_steps": 7, "eval_steps": 2}, [2, 3, 4, 6, 7]),
    ],
    ids=str,
)
def test_a_run_is_evaluated_once_after_every_epoch_and_at_eval_steps(values, expected):
    plan, at, found = plan_of(**values), Position(), []
    assert not plan.evaluates(at)
    for iteration in range(1, plan.steps + 1):
        at.iteration = iteration
        if plan.evaluates(at):
            found.append(iteration)
            at.evaluated = iteration
            assert not plan.evaluates(at)
    assert found == expected


def test_a_position_has_the_mean_loss_of_the_epoch_so_far():
    at = Position()
    for loss, share in ((1.0, 1.0), (2.0, 1.0), (6.0, 0.5)):
        at.add(loss, share)
    assert at.end_epoch(0.5) == {"iterations": 3, "loss": (1 + 2 + 6 / 2) / 2.5}
    at.add(5.0, 1.0)
    assert at.end_epoch(1.0) == {"iterations": 1, "loss": 5.0}


def test_the_last_iteration_of_an_epoch_has_what_is_left_of_the_examples():
    plan = plan_of(num_train_epochs=2)
    for number, (_, batch) in enumerate(plan.batches(after=0), start=1):
        assert plan.share(number) == len(batch) / plan.batch_size


@pytest.mark.parametrize(
    ("early", "values", "expected"),
    [
        (
            EarlyStopping(patience=2),
            [0.9, 0.8, 0.8, 0.7, 0.75, None],
            [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)],
        ),
        (EarlyStopping("acc", 1), [0.5, 0.6, 0.6], [(True, False), (True, False), (False, True)]),  # larger is better
        (EarlyStopping(), [0.5] * 9, [(True, False)] + [(False, False)] * 8),  # no patience, no end
        (EarlyStopping(patience=1), [None], [(False, True)]),
    ],
)
def test_patience_ends_after_that_many_evaluations_without_a_better_metric(early, values, expected):
    """After each evaluation: was it the best, and is the patience at its end?"""
    rows = [{} if value is None else {early.metric: value} for value in values]
    assert [(early.see(row, place), early.is_over) for place, row in enumerate(rows, start=1)] == expected
    found = [value for value in values if value is not None]
    if found:
        best = (max if early.metric == "acc" else min)(found)
        assert (early.best, early.best_iteration) == (best, values.index(best) + 1)


@pytest.mark.parametrize(
    ("task", "metric", "fits"),
    [("rte", "acc", True), ("mrpc", "f1", True), ("squad", "exact_match", True)]
    + [("digits", "f1_macro", True), ("rte", "f1_macro", True), ("sts-b", "f1_macro", False)],
)
def test_early_stopping_takes_the_task_s_own_metrics(task, metric, fits):
    values = {"task_name": task, "early_stopping": f"3:{metric}", "do_train": True, "do_eval": True}
    values |= {"model_type": "vit", "model_name_or_path": "vit-tiny"} if task == "digits" else {"max_seq_length": 384}
    config = RunConfig(**values)
    if fits:
        config.check(1)
        assert (config.patience(), config.metric()) == (3, metric)
    else:
        with pytest.raises(UsageError, match=f"unknown metric '{metric}'"):
            config.check(1)


def test_all_ranks_stop_early_at_the_same_evaluation(start, tmp_path):
    """A rate of 0 leaves every evaluation as good as the first."""
    words = [script("task2b/run_glue.py"), *TINY, "--learning_rate", 0, "--max_steps", 40, "--eval_steps", 3]
    words += ["--early_stopping", 2, "--log_every", 4, "--world_size", 2, "--no_save_model", "--output_dir", "out"]
    program = start("program", words)
    assert program.wait() == 0, program.text
    run = load_run(tmp_path / "out")
    assert run["iterations"] == 9
    for rank in range(2):
        rows = rows_of(tmp_path / "out" / f"iterations.rank{rank}.jsonl")
        assert [row["iteration"] for row in rows] == list(range(1, 10))
    assert [row["iteration"] for row in run["evaluations"]] == [3, 6]
    assert all({"acc", "validation_loss", "epoch"} <= row.keys() for row in run["evaluations"])
    (epoch,) = run["epochs"]
    assert (epoch["iterations"], epoch["training"]["examples"], epoch["is_cut"]) == (9, 9 * 16, True)
    assert "stopped early: 2 evaluations in a row had no better validation_loss than the best" in program.text
    assert "after iteration 6: acc " in program.text
    assert "iteration 8: loss" in program.text
    assert "iteration 7: loss" not in program.text


@pytest.fixture(autouse=True)
def _handlers():
    """Every test has Python's own handler of Ctrl-C, and leaves the handlers as they were."""
    before = {number: signal.getsignal(number) for number in ENDING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python calls the handler before the next line


@pytest.mark.parametrize("number", ENDING)
def test_only_the_first_request_counts(number):
    with Requests() as requests:
        assert requests.first is None
        send(number)
        assert requests.first is number
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert requests.first is number


@pytest.mark.parametrize("number", ENDING)
def test_a_ctrl_c_after_a_request_interrupts_at_once(number):
    with Requests():
        send(number)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_after_the_context_signals_have_their_earlier_handlers():
    with Requests():
        pass
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Requests() as requests:
        send(signal.SIGINT)
        assert requests.first is None


def test_the_watchdog_obeys_only_the_second_ctrl_c():
    """It hears each of them, though Python's handler may be called once for two."""
    assert not is_noted(signal.SIGINT)
    with Requests():
        assert is_noted(signal.SIGUSR1)
        assert is_noted(signal.SIGTERM)
        assert not is_noted(signal.SIGINT)
    with Requests():
        assert is_noted(signal.SIGINT)
        assert not is_noted(signal.SIGINT)
    assert not is_noted(signal.SIGINT)


def test_a_scheduler_may_repeat_a_request_that_is_met():
    with Requests() as requests:
        send(signal.SIGTERM)
        requests.is_met = True
    send(signal.SIGTERM)
    send(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def two_ranks():
    """What Stopping asks of communicators, for two ranks in this process."""
    store = HashStore()
    return [SimpleNamespace(rank=rank, store=store, exchange=lambda _: ["word"]) for rank in range(2)]


def votes_by_name(stopping):
    return {name for name, vote in zip(Stopping.VOTES, stopping.votes()) if vote}


def test_a_rank_votes_for_its_request_and_rank_0_by_its_clock():
    flags, now = CheckpointFlags(max_seconds=60.0, save_seconds=20.0), [100.0]
    with Requests() as requests:
        first, second = (Stopping(flags, comm, requests, 100.0, lambda: now[0]) for comm in two_ranks())
        assert votes_by_name(first) == votes_by_name(second) == set()
        now[0] = 120.0
        assert (votes_by_name(first), votes_by_name(second)) == ({"save"}, set())
        first.saved()
        assert votes_by_name(first) == set()
        now[0] = 160.0
        assert votes_by_name(first) == {"save", "max_seconds"}
        send(signal.SIGUSR1)
        assert votes_by_name(second) == {"SIGUSR1"}


def test_a_request_reaches_the_others_while_no_loss_travels():
    now = [100.0]
    first, second = (
        Stopping(CheckpointFlags(max_seconds=60.0), comm, Requests(), 100.0, lambda: now[0]) for comm in two_ranks()
    )
    now[0] = 159.0
    assert (first.is_asked(), second.is_asked()) == (False, False)
    now[0] = 160.0
    assert first.is_asked()
    assert second.is_asked(), "it looks again after a while"
    third = Stopping(CheckpointFlags(), two_ranks()[1], Requests(), 100.0, lambda: now[0])
    assert not third.is_asked()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SIGTERM", "stopped by SIGTERM"),
        ("SIGINT", "stopped by SIGINT"),
        ("max_seconds", "--max_seconds 9 have passed"),
        ("save", None),
    ],
)
def test_one_vote_stops_all_ranks_with_its_reason(name, reason):
    stopping = Stopping(CheckpointFlags(max_seconds=9.0), two_ranks()[1], Requests(), 0.0)
    stopping.count(QUIET)
    assert (stopping.reason, stopping.wants_save) == (None, False)
    stopping.count([float(name == one) for one in Stopping.VOTES])
    assert (stopping.reason, stopping.wants_save) == (reason, name == "save")


def test_setting_the_host_s_clock_changes_no_deadline(monkeypatch):
    with Requests() as requests:
        flags = CheckpointFlags(max_seconds=1000.0, save_seconds=1000.0)
        stopping = Stopping(flags, two_ranks()[0], requests, time.monotonic())
        for hours in (-1e6, 1e6):
            monkeypatch.setattr(time, "time", lambda hours=hours: hours * 3600)
            assert stopping.votes() == QUIET
