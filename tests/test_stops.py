"""A program that is asked to end saves and leaves with exit code 75, and its starter passes on what it is asked."""

import errno
import json
import os
import re
import signal

import pytest
from lives import checkpoints_in, rows_of
from programs import ROOT, TINY, children_of, is_alive, script, worker_of_rank

from cos598d.errors import UserError
from cos598d.world import launch
from cos598d.world.launch import start_local_workers

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


# Its workers save for a while when they are asked to end, and obey the Ctrl-C after that; `words` say how they end.
SCRIPT = """
import os, signal, sys, time

kind, seconds, code = sys.argv[1:]
asked = []

def ask(number, _):
    if asked and number == signal.SIGINT:
        print(f"rank {os.environ['RANK']} leaves at once", flush=True)
        os._exit(130)
    asked.append(number)

def work():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, ask)
    is_fork = open("/proc/self/comm").read().strip() == f"rank {os.environ['RANK']}"
    time.sleep(0.3)  # until the starter, which has forked this one, waits
    print(f"rank {os.environ['RANK']}, {'a fork' if is_fork else 'fresh'}, trains")
    while not asked:
        time.sleep(0.01)
    print(f"rank {os.environ['RANK']} was asked by {signal.Signals(asked[0]).name}")
    until = time.monotonic() + float(seconds) * (1 + int(os.environ["RANK"]))
    while time.monotonic() < until:
        time.sleep(0.01)
    return int(code)

if "RANK" in os.environ:
    sys.exit(work())
from cos598d.world.launch import start_local_workers
sys.exit(start_local_workers(2, None, sys.argv[1:], be_rank=work if kind == "a fork" else None))
"""


@pytest.fixture(params=["fresh", "a fork"])
def starter(start, tmp_path, request):
    """Start two such workers, in fresh interpreters and as forks: starter(seconds of saving, their exit code)."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def _starter(seconds, code):
        words = [tmp_path / "script.py", request.param, seconds, code]
        program = start("starter", words, {"PYTHONPATH": str(ROOT)})
        for rank in range(2):
            program.wait_for(f"rank {rank}, {request.param}, trains")
        return program

    return _starter


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize(
    ("number", "passed_on"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
        (signal.SIGINT, "SIGINT"),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_a_starter_passes_a_request_on_and_waits_until_the_workers_have_saved(starter, number, passed_on):
    program = starter(0.5, 75)
    program.process.send_signal(number)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by {passed_on}")
    for repeated in (signal.SIGTERM, signal.SIGUSR1):  # by a scheduler
        program.process.send_signal(repeated)
    assert program.wait() == 75, program.text
    assert "stopped by" not in program.text


@pytest.mark.parametrize(("code", "expected"), [(1, 128 + signal.SIGTERM), (0, 0)])
def test_workers_that_are_done_end_well_and_others_by_the_signal(starter, code, expected):
    """A worker that learns of another's end has exit code 1."""
    program = starter(0, code)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == expected, program.text


def test_the_second_ctrl_c_ends_the_workers_at_once(starter):
    program = starter(600, 75)
    program.process.send_signal(signal.SIGINT)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by SIGINT")
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == 130, program.text
    for rank in range(2):
        assert f"rank {rank} leaves at once" in program.text


def test_a_host_without_room_for_more_processes_is_an_error(monkeypatch):
    def refused(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(launch.subprocess, "Popen", refused)
    with pytest.raises(UserError, match=r"rank 0 of 2 cannot be started on this host \(Resource temporarily unav"):
        start_local_workers(2, None, [])
