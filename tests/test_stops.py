"""A run that is asked to end finishes its step, saves, leaves with exit code 75 and goes on to the same end."""

import errno
import json
import os
import re
import signal

import pytest
from lives import all_whole, checkpoints_in, live
from programs import ROOT, TINY, script
from test_faults import children_of, is_alive, worker_of_rank
from worlds import run_ranks

from cos598d.checkpoints import writer

NO_SAVES = {"save_steps": None}
LONG = (*TINY, "--num_train_epochs", "50", "--no_save_model", "--dropout", "0.1")
TASK2B = "task2b/run_glue.py"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted(values): what the run comes to on 2 ranks that nobody asks to end, computed once."""
    found = {}

    def _uninterrupted(values):
        name = json.dumps(values, sort_keys=True)
        if name not in found:
            found[name] = run_ranks(2, live, str(tmp_path_factory.mktemp("whole")), values)
        return found[name]

    return _uninterrupted


@pytest.fixture
def same_end(uninterrupted, tmp_path):
    """same_end(values, fate, age): start a run that is asked to end, and go on; the two starts' results, by rank.

    Both are compared with the run that was not asked.
    """

    def _same_end(values, fate, age=0.0):
        whole = uninterrupted(values)
        stopped = run_ranks(2, live, str(tmp_path), values, fate, age)
        found = run_ranks(2, live, str(tmp_path), values | {"resume": "auto"})
        assert found[0]["epochs"] == whole[0]["epochs"]
        for one, other in zip(found, whole):
            assert one["losses"] == other["losses"]
            assert one["weights"] == other["weights"]
            assert travelled(one) == travelled(other)
            assert one["disagree"] == other["disagree"] == []
            assert one["sent"] == other["sent"]
        assert all_whole(tmp_path)
        return stopped, found

    return _same_end


def travelled(found):
    """What travelled by purpose, but for checkpoints: the two runs have not the same ones."""
    return {purpose: sums for purpose, sums in found["totals"]["by_purpose"].items() if purpose != "state"}


@pytest.mark.long(one_in=5)
@pytest.mark.parametrize(
    ("rank", "values"),
    [
        (0, {"sync": "bucketed"}),
        (1, {"sync": "bucketed"}),
        (0, {"sync": "zero3"}),
        (1, {"sync": "local_sgd", "sync_every": 3}),
        (0, {"sync": "diloco"}),
    ],
    ids=lambda value: value["sync"] if isinstance(value, dict) else None,
)
def test_all_ranks_end_after_the_step_in_which_one_was_asked(values, rank, same_end):
    """No checkpoint was asked for: one is made then all the same."""
    stopped, found = same_end(NO_SAVES | values, ("asked", 5, rank))
    for one in stopped:
        assert (one["stopped"], one["saved"], len(one["losses"])) == ("stopped by SIGTERM", 5, 5)
    assert {one["from"] for one in found} == {5}
    assert {one["stopped"] for one in found} == {None}


@pytest.mark.long(one_in=6)
@pytest.mark.parametrize(
    ("point", "iteration", "values"),
    [
        ("asked", 7, {"sync": "bucketed"}),
        ("asked", 7, {"sync": "diloco", "sync_every": 2, "fragments": 2, "compress": "bf16"}),
        ("asked", 7, {"sync": "zero3"}),
        ("asked", 12, {"sync": "local_sgd", "sync_every": 3}),
        ("asked in the evaluation", 7, {"sync": "local_sgd", "sync_every": 3}),
        ("asked in the evaluation", 12, {"sync": "bucketed"}),
    ],
)
def test_an_evaluation_that_is_due_is_made_when_the_run_goes_on(values, point, iteration, same_end):
    """Also after the last step, and when the request comes while the ranks evaluate."""
    stopped, found = same_end(NO_SAVES | values, (point, iteration, 1))
    for one in stopped:
        assert (one["stopped"], one["saved"], len(one["losses"])) == ("stopped by SIGTERM", iteration, iteration)
        assert len(one["epochs"]) == (iteration - 1) // 7
    assert {one["from"] for one in found} == {iteration}


@pytest.mark.long
def test_when_the_time_is_up_the_run_saves_and_leaves(same_end):
    stopped, found = same_end({"sync": "bucketed", "max_seconds": 3600.0}, None, age=3600.0)
    for one in stopped:
        assert (one["stopped"], one["saved"]) == ("--max_seconds 3600 have passed", 1)
    assert {one["from"] for one in found} == {1}


def test_a_checkpoint_is_made_when_so_many_seconds_have_passed(tmp_path):
    values = {"sync": "bucketed", "save_steps": None, "save_seconds": 1e-6, "keep": 99, "max_steps": 5}
    run_ranks(2, live, str(tmp_path), values)
    assert checkpoints_in(tmp_path) == [1, 2, 3, 4, 5]


def with_a_full_disk(comm, folder, values, fate):
    """A run whose disk is full when the checkpoint after iteration 8, and whatever follows, is written."""
    write = writer.write_tensors

    def full(path, *arguments):
        if "step-00000004" not in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *arguments)

    writer.write_tensors = full
    return live(comm, folder, values, fate)


@pytest.mark.long
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(uninterrupted, tmp_path):
    whole = uninterrupted({"sync": "bucketed"})
    found = run_ranks(2, with_a_full_disk, str(tmp_path), {"sync": "bucketed"}, None)
    assert [one["losses"] for one in found] == [one["losses"] for one in whole]
    assert {one["saved"] for one in found} == {4}
    assert checkpoints_in(tmp_path) == [4]
    said = [line for line in found[0]["lines"] if "No space left on device" in line]
    assert said[0].startswith("the checkpoint of iteration 7 cannot be written to ")
    assert all("that of iteration 4 is complete" in line for line in said)


@pytest.mark.long
def test_a_run_that_is_asked_to_end_on_a_full_disk_goes_on_from_the_one_before(tmp_path):
    fate = ("asked", 6, 0)
    stopped = run_ranks(2, with_a_full_disk, str(tmp_path), {"sync": "bucketed"}, fate)
    assert {(one["stopped"], one["saved"]) for one in stopped} == {("stopped by SIGTERM", 4)}
    found = run_ranks(2, live, str(tmp_path), {"sync": "bucketed", "resume": "auto"})
    assert {one["from"] for one in found} == {4}


@pytest.mark.long
def test_early_stopping_ends_with_the_best_model_also_when_it_goes_on(same_end):
    """By the accuracy, which the first evaluation has as well as all others: a model that has learned nothing."""
    values = {"sync": "bucketed", "eval_steps": 3, "early_stopping": "2:acc", "learning_rate": 1e-9}
    stopped, found = same_end(values, ("asked", 5, 1))
    for one in (*stopped, *found):
        assert one["stopped"] == ("stopped by SIGTERM" if one in stopped else None)
    for one in found:
        assert len(one["losses"]) == 7
        assert one["best"]["iteration"] == 3
        assert one["best"]["metric"] == "acc"
        assert one["best"]["evaluated"]["acc"] == one["best"]["value"]
    assert any(line.startswith("stopped early: 2 evaluations in a row") for line in found[0]["lines"])
    (last,) = [one for one in found[0]["epochs"] if one["epoch"] == 1]
    assert last["iterations"] == 7


# Whole programs, as a user starts and stops them.


def rows_of(folder, rank):
    return [json.loads(row)["iteration"] for row in (folder / f"iterations.rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.long(one_in=2)
@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_one_rank_that_is_asked_stops_all_and_the_same_words_go_on(start_ranks, tmp_path, number, name):
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
        assert rows_of(tmp_path / "out" / "live", rank) == list(range(1, again_at + 1))
    attempts = json.loads((tmp_path / "out" / "live" / "attempts.json").read_text())["attempts"]
    assert [one["why"] for one in attempts] == [f"stopped by {name}", "--max_seconds 1 have passed"]


@pytest.mark.long
def test_a_starter_saves_goes_on_and_says_when_there_is_nothing_left(start, tmp_path):
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
def test_a_second_ctrl_c_leaves_at_once(start, tmp_path):
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


def test_two_runs_cannot_go_on_in_one_folder_at_once(start, tmp_path):
    words = [script(TASK2B), *LONG, "--output_dir", "out", "--resume", "auto"]
    first = start("first", words)
    first.wait_for("iteration 5:")
    second = start("second", words)
    assert second.wait() == 1
    assert second.text.strip() == "error: --output_dir out is in use by another run. Choose another folder."
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 75, first.text


def test_a_run_in_a_folder_of_its_own_goes_on_by_that_folder(start, tmp_path):
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--resume", "auto"], "--resume auto looks in the run's folder. Give --output_dir."),
        (["--resume_anyway"], "--resume_anyway has no effect without --resume. Leave it out, or add --resume."),
        (["--do_eval", "--save_steps", "5"], "--save_steps is for training. Leave it out, or add --do_train."),
        (["--max_seconds", "0"], "--max_seconds 0 is not valid. Give a number above 0."),
        (["--keep", "0"], "--keep 0 is not valid. Give a number of at least 1."),
    ],
)
def test_flags_that_cannot_work_are_refused(run_here, words, sentence):
    assert run_here(TASK2B, words) == (2, f"error: {sentence}\n")
