"""A training ends before its last step when it is to, at the same one on every rank."""

import json

import pytest
from programs import TINY, script

from cos598d.checkpoint_flags import LOSS_METRIC
from cos598d.checkpoints.control import EarlyStopping
from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.tools.report.load import load_run


def seen(early, values, name=LOSS_METRIC):
    """After each evaluation: was it the best, and is the patience at its end?"""
    return [
        (early.see({} if value is None else {name: value}, place), early.is_over)
        for place, value in enumerate(values, start=1)
    ]


def test_patience_ends_after_so_many_evaluations_without_a_smaller_loss():
    early = EarlyStopping(patience=2)
    found = seen(early, [0.9, 0.8, 0.8, 0.7, 0.75, None])
    assert found == [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)]
    assert (early.best, early.best_iteration) == (0.7, 4)


def test_any_other_metric_is_better_when_it_is_larger():
    early = EarlyStopping("acc", 1)
    assert seen(early, [0.5, 0.6, 0.6], "acc") == [(True, False), (True, False), (False, True)]


def test_without_patience_there_is_a_best_and_no_end():
    assert seen(EarlyStopping(), [0.5] * 9)[-1] == (False, False)


def test_an_evaluation_without_the_metric_is_no_best():
    assert seen(EarlyStopping(patience=1), [None]) == [(False, True)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"early_stopping": "0"},
            "--early_stopping 0 is not valid. Give a number of evaluations from 1",
        ),
        ({"early_stopping": "x"}, "--early_stopping x is not valid. Give a number"),
        ({"early_stopping": "2:"}, "--early_stopping 2: is not valid. Give a number"),
        (
            {"early_stopping": "2:f1"},
            "unknown metric 'f1'. Choose one of validation_loss, acc, precision_macro, recall_macro, f1_macro.",
        ),
        ({"early_stopping": "2", "do_eval": False}, "--early_stopping 2 needs evaluations. Add --do_eval."),
        ({"eval_steps": 2, "do_eval": False}, "--eval_steps 2 needs evaluations"),
        ({"eval_steps": 0}, "--eval_steps 0 is not valid. Give a number of at least 1."),
        ({"log_every": 0}, "--log_every 0 is not valid. Give a number of at least 1."),
        ({"lr_scheduler": "step"}, "unknown --lr_scheduler step. Choose one of linear, constant, cosine."),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_a_sentence(values, words):
    with pytest.raises(UsageError) as caught:
        RunConfig(**{"do_train": True, "do_eval": True, "sync": "all_reduce"} | values).check(2)
    assert words in str(caught.value)


def test_early_stopping_takes_the_task_s_own_metrics():
    for task, metric in (("rte", "acc"), ("mrpc", "f1"), ("squad", "exact_match")):
        config = RunConfig(
            task_name=task, do_train=True, do_eval=True, early_stopping=f"3:{metric}", max_seq_length=384
        )
        config.check(1)
        assert (config.patience(), config.metric()) == (3, metric)


def test_all_ranks_stop_early_at_the_same_evaluation(start, tmp_path):
    """A rate of 0 leaves every evaluation as good as the first."""
    words = [script("task2b/run_glue.py"), *TINY, "--learning_rate", 0, "--max_steps", 40, "--eval_steps", 3]
    words += ["--early_stopping", 2, "--log_every", 4, "--world_size", 2, "--no_save_model", "--output_dir", "out"]
    program = start("program", words)
    assert program.wait() == 0, program.text
    run = load_run(tmp_path / "out")
    assert run["iterations"] == 9
    for rank in range(2):
        rows = (tmp_path / "out" / f"iterations.rank{rank}.jsonl").read_text().splitlines()
        assert [json.loads(row)["iteration"] for row in rows] == list(range(1, 10))
    assert [row["iteration"] for row in run["evaluations"]] == [3, 6]
    assert all({"acc", "validation_loss", "epoch"} <= row.keys() for row in run["evaluations"])
    (epoch,) = run["epochs"]
    assert (epoch["iterations"], epoch["training"]["examples"], epoch["is_cut"]) == (9, 9 * 16, True)
    assert "stopped early: 2 evaluations in a row had no better validation_loss than the best" in program.text
    assert "after iteration 6: acc " in program.text
    assert "iteration 8: loss" in program.text
    assert "iteration 7: loss" not in program.text
