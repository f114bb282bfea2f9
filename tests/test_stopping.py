"""Runs that are stopped and go on: signals, and what makes it another run.

The rules of the plan are called as they are, since a program needs many evaluations for each.
"""

import json
import os
import signal

import pytest
from programs import TINY, Program, worker_of_rank

from cos598d.config import RunConfig
from cos598d.plan import Plan, Position

# 16 examples of 40 per step: 3 steps in an epoch.
RUN = ["-m", "cos598d", "train", *TINY, "--max_train_examples", "40", "--max_eval_examples", "16", "--dropout", "0.1"]
RANKS = ["--world_size", "2", "--sync", "zero1"]


def start(folder, name, *words):
    return Program(folder, name, [*RUN, *map(str, words), "--output_dir", str(folder / name)])


def end(program, code=0):
    assert program.wait() == code, program.text
    return program.text


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 steps that nothing stops, with checkpoints where the others have them."""
    folder = tmp_path_factory.mktemp("whole")
    end(start(folder, "whole", *RANKS, "--num_train_epochs", 4))
    return summary(folder / "whole")


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_one_rank_saves_and_the_run_goes_on_to_the_same_bits(whole, tmp_path, number):
    words = [*RANKS, "--num_train_epochs", 4, "--resume", "auto"]
    first = start(tmp_path, "run", *words)
    first.wait_for("iteration 2:")
    os.kill(worker_of_rank(first.process.pid, 1), number)
    text = end(first, 75)
    assert f"stopped by {number.name} after iteration" in text
    assert "To go on, run the same command again." in text
    again = end(start(tmp_path, "run", *words))
    assert "resumes after iteration" in again
    found = summary(tmp_path / "run")
    assert found["losses"] == whole["losses"]
    assert [epoch["acc"] for epoch in found["epochs"]] == [epoch["acc"] for epoch in whole["epochs"]]
    assert [attempt["lost_iterations"] for attempt in found["attempts"]] == [0, 0]
    assert "nothing is left to train" in end(start(tmp_path, "run", *words))


def stop(folder, *words):
    """A run that is asked to stop after its first step, or soon."""
    program = start(folder, "run", *words)
    program.wait_for("iteration 1:")
    os.kill(program.process.pid, signal.SIGTERM)
    end(program, 75)


def test_other_ranks_go_on(whole, tmp_path):
    words = ["--num_train_epochs", 4, "--resume", "auto"]
    stop(tmp_path, *RANKS, *words)
    other = end(start(tmp_path, "run", "--world_size", "3", "--sync", "bucketed", *words))
    assert "with 3 ranks in place of 2, so random numbers differ" in other
    found = summary(tmp_path / "run")
    assert found["losses"][0] == whole["losses"][0]
    assert len(found["losses"]) == 12
    assert [attempt["ranks"] for attempt in found["attempts"]] == [2, 3]


def test_another_run_is_refused_unless_it_is_asked_for(tmp_path):
    words = ["--num_train_epochs", 4, "--resume", "auto"]
    stop(tmp_path, *words)
    refused = end(start(tmp_path, "run", *words, "--learning_rate", "0.1", "--seed", "7"), 2)
    assert "--seed was 42 and is 7; --learning_rate was" in refused
    assert "--resume_anyway" in refused
    assert "Traceback" not in refused
    forced = end(start(tmp_path, "run", *words, "--learning_rate", "0.1", "--resume_anyway"))
    assert "resumes anyway: --learning_rate" in forced


@pytest.mark.parametrize(
    ("values", "evaluated", "saved"),
    [
        ({"num_train_epochs": 2}, [3, 6], [3, 6]),
        ({"num_train_epochs": 1}, [3], []),
        ({"max_steps": 5}, [3, 5], []),
        ({"max_steps": 7, "eval_steps": 2, "save_steps": 3}, [2, 3, 4, 6, 7], [3, 6]),
        ({"num_train_epochs": 4, "save_epochs": 2}, [3, 6, 9, 12], [6, 12]),
        ({"num_train_epochs": 2.5}, [3, 6, 8], [3, 6, 8]),
    ],
    ids=str,
)
def test_when_a_run_is_evaluated_and_saved(values, evaluated, saved):
    plan, at = Plan(RunConfig(total_train_batch_size=4, **values), 10, 1), Position()
    found = {"evaluated": [], "saved": []}
    for iteration, (epoch, batch) in enumerate(plan.batches(0), 1):
        at.iteration = iteration
        assert epoch == plan.epoch_of(iteration)
        assert len(batch) == min(4, 10 - (iteration - 1) % 3 * 4)
        found["saved"] += [iteration] * plan.saves(at)
        if plan.evaluates(at):
            found["evaluated"].append(iteration)
            at.evaluated = iteration
    assert at.iteration == plan.steps
    assert found == {"evaluated": evaluated, "saved": saved}
