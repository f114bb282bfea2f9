"""A program that is asked to end saves and leaves with exit code 75; the same command resumes."""

import json
import os
import re
import signal

import pytest
from lives import checkpoints_in, rows_of
from programs import ROOT, TINY, children_of, is_alive, script, worker_of_rank

LONG = (*TINY, "--num_train_epochs", "50", "--no_save_model", "--dropout", "0.1")
TASK2B = "task2b/run_glue.py"


@pytest.mark.long(one_in=2)
@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_one_rank_that_is_asked_stops_all_and_the_same_command_resumes(start_ranks, tmp_path, number, name):
    words = [*LONG, "--output_dir", "out", "--resume", "auto"]
    ranks = start_ranks(TASK2B, 2, words)
    ranks[1].wait_for("iteration 5:")
    ranks[1].process.send_signal(number)
    for rank, program in enumerate(ranks):
        assert program.wait() == 75, program.text
        last = program.text.strip().splitlines()[-1]
        assert last.startswith(f"rank {rank}: stopped by {name} after iteration "), program.text
        assert last.endswith("run the same command again.")
        assert "Traceback" not in program.text
    (stopped_at,) = checkpoints_in(tmp_path / "out")
    ranks = start_ranks(TASK2B, 2, [*words, "--max_seconds", "1"])
    for program in ranks:
        assert program.wait() == 75, program.text
        assert f"resumes after iteration {stopped_at}, from out/checkpoints/step-{stopped_at:08d}" in program.text
    (again_at,) = {int(re.search(r"--max_seconds 1 have passed after iteration (\d+)", one.text)[1]) for one in ranks}
    assert checkpoints_in(tmp_path / "out")[-1] == again_at > stopped_at
    for rank in range(2):
        rows = rows_of(tmp_path / "out" / "live" / f"iterations.rank{rank}.jsonl")
        assert [row["iteration"] for row in rows] == list(range(1, again_at + 1))
    attempts = json.loads((tmp_path / "out" / "live" / "attempts.json").read_text())["attempts"]
    assert [one["why"] for one in attempts] == [f"stopped by {name}", "--max_seconds 1 have passed"]


@pytest.mark.long
def test_a_starter_saves_resumes_and_ends_when_nothing_is_left_to_train(start, tmp_path):
    words = [script(TASK2B), *TINY, "--max_steps", 150, "--world_size", 2, "--output_dir", "out"]
    program = start("first", words)
    program.wait_for("iteration 5:")
    program.process.send_signal(signal.SIGUSR1)
    assert program.wait() == 75, program.text
    assert "run the same command with --resume auto." in program.text
    again = start("again", [*words, "--resume", "auto"])
    assert again.wait() == 0, again.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["iterations"] == 150
    assert [one["ranks"] for one in summary["attempts"]] == [2, 2]
    assert sum(one["lost_iterations"] for one in summary["attempts"]) == 0
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    third = start("third", [*words, "--resume", "auto"])
    assert third.wait() == 0, third.text
    assert third.text.strip().splitlines()[-1] == "the run in out is finished, so nothing is left to train."
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_second_ctrl_c_ends_a_stuck_run_at_once(start, tmp_path):
    """Rank 1 is stopped, so that no step ends: the first request cannot be met."""
    program = start("starter", [script(TASK2B), *LONG, "--world_size", 2, "--output_dir", "out"])
    program.wait_for("iteration 5:")
    workers = children_of(program.process.pid)
    stuck = worker_of_rank(program.process.pid, 1)
    os.kill(stuck, signal.SIGSTOP)
    program.process.send_signal(signal.SIGINT)
    with pytest.raises(AssertionError):
        program.wait(4)
    program.process.send_signal(signal.SIGINT)
    os.kill(stuck, signal.SIGCONT)
    assert program.wait() == 130, program.text
    assert not any(is_alive(worker) for worker in workers)
    assert "Traceback" not in program.text, program.text


def test_two_runs_cannot_use_one_folder_at_once(start, tmp_path):
    words = [script(TASK2B), *LONG, "--output_dir", "out", "--resume", "auto"]
    first = start("first", words)
    first.wait_for("iteration 5:")
    second = start("second", words)
    assert second.wait() == 1
    assert second.text.strip() == "error: --output_dir out is in use by another run. Choose another folder."
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 75, first.text


def test_a_run_without_output_dir_resumes_from_its_own_folder(start, tmp_path):
    words = [script(TASK2B), *LONG]
    first = start("first", words)
    first.wait_for("iteration 5:")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 75, first.text
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"run the same command with --resume runs/{folder.name}." in first.text
    again = start("again", [*words, "--resume", f"runs/{folder.name}", "--max_seconds", 1])
    assert again.wait() == 75, again.text
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert str(ROOT) not in again.text
