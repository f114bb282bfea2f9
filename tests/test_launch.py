"""A command starts its ranks here, passes on what it is asked, and ends with the code of the first that failed.

Imports `world.launch`: its caller is a program of each test, with ranks that do nothing but tell about themselves.
"""

import json
import signal

import pytest
import torch
from programs import PATIENCE, ROOT, TINY_TRAINING, children_of, script

from cos598d.world import launch

# Three ranks print facts about themselves. Then the second is killed. With "threads" a thread prevents forks.
FACTS = """
import functools, json, os, signal, sys, threading, time

os.environ["OPENBLAS_NUM_THREADS"] = "1"
from cos598d.world.launch import start_local_workers

def tell(kind):
    rank = int(os.environ["RANK"])
    facts = {
        "kind": kind,
        "session": os.getsid(0) == os.getpid(),
        "signals": [signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGUSR1)],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "place": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")],
        "listens": "COS598D_LISTENER" in os.environ,
        "secret": os.environ["COS598D_SECRET"],
    }
    sys.stdout.write(f"\\n{json.dumps(facts)}\\n")  # one call, and no flush
    open(f"told{rank}", "w").close()
    while not all(os.path.exists(f"told{each}") for each in range(3)):
        time.sleep(0.01)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0 if rank == 0 else 60)
    return 0

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: None)
    print("the starter's own line", end=" ")  # in its buffer while it forks
    if sys.argv[1:] == ["threads"]:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    sys.exit(start_local_workers(3, None, functools.partial(tell, "mine")))
"""


@pytest.mark.parametrize("how", ["forks", pytest.param("threads", marks=pytest.mark.long)])
def test_ranks_have_sessions_signals_and_places_of_their_own_and_a_killed_one_is_named(start, tmp_path, how):
    (tmp_path / "script.py").write_text(FACTS)
    words = [tmp_path / "script.py", *([] if how == "forks" else ["threads"])]
    program = start("starter", words, {"PYTHONPATH": str(ROOT)}, is_fresh=True)
    assert program.wait() == 128 + signal.SIGKILL
    facts = sorted(
        (json.loads(line) for line in program.text.splitlines() if line.startswith("{")), key=lambda one: one["place"]
    )
    assert [one["place"] for one in facts] == [[str(rank), str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert [one["listens"] for one in facts] == [True, False, False]
    assert len({one["secret"] for one in facts}) == 1
    for one in facts:
        assert (one["kind"], one["session"], one["interrupt"], one["blocked"]) == ("mine", True, True, [])
        assert one["signals"] == [True, True]
    assert program.text.rstrip().endswith("rank 1 was ended by SIGKILL."), program.text
    assert program.text.count("the starter's own line") == 1, "a fork repeats its starter's output"


# Two ranks that save for a while when they are asked to end; `words` say how long, and with which code they end.
ASKED = """
import os, signal, sys, time
from cos598d.world.launch import start_local_workers

def work():
    asked = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    print(f"rank {os.environ['RANK']} trains", flush=True)
    while not asked:
        time.sleep(0.01)
    print(f"rank {os.environ['RANK']} was asked by {signal.Signals(asked[0]).name}", flush=True)
    until = time.monotonic() + float(sys.argv[1]) * (1 + int(os.environ["RANK"]))
    while time.monotonic() < until:
        time.sleep(0.01)
    return int(sys.argv[2])

if __name__ == "__main__":
    sys.exit(start_local_workers(2, None, work))
"""


@pytest.fixture
def starter(start, tmp_path):
    """Start two such ranks: starter(seconds of saving, their exit code)."""
    (tmp_path / "script.py").write_text(ASKED)

    def _starter(seconds, code):
        program = start("starter", [tmp_path / "script.py", seconds, code], {"PYTHONPATH": str(ROOT)})
        for rank in range(2):
            program.wait_for(f"rank {rank} trains")
        return program

    return _starter


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_is_passed_on_and_all_may_save(starter, number):
    program = starter(0.5, 75)
    program.process.send_signal(number)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by {number.name}")
    for repeated in (signal.SIGTERM, signal.SIGUSR1):  # by a scheduler
        program.process.send_signal(repeated)
    assert program.wait() == 75, program.text


@pytest.mark.parametrize(("code", "expected"), [(1, 128 + signal.SIGTERM), (0, 0)])
def test_ranks_that_are_done_end_well_and_others_by_the_signal(starter, code, expected):
    program = starter(0, code)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == expected, program.text


def test_the_second_ctrl_c_ends_all_at_once(starter):
    program = starter(600, 75)
    program.process.send_signal(signal.SIGINT)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by SIGINT")
    program.process.send_signal(signal.SIGINT)
    assert program.wait(PATIENCE) == 130, program.text


@pytest.mark.parametrize(
    ("has_gpu", "tasks", "may"), [(False, ["1"], True), (True, ["1"], False), (False, "12", False)]
)
def test_a_starter_with_a_gpu_or_threads_does_not_fork(monkeypatch, has_gpu, tasks, may):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(launch.os, "listdir", {"/proc/self/task": tasks}.__getitem__)
    assert launch.may_fork() is may


def test_the_starter_reports_an_error_once_and_starts_no_rank(start):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--world_size", 2, "--data_dir", "nowhere"]
    program = start("starter", words)
    assert program.wait() == 1
    assert program.text.startswith("error: the data folder nowhere of --data_dir does not exist. "), program.text
    assert len(program.text.splitlines()) == 1


OWN = "from cos598d.sync.all_reduce import AllReduce\n\n\nclass Own(AllReduce):\n    pass\n"


@pytest.mark.long
def test_a_training_in_fresh_interpreters_gives_the_same_losses(start, tmp_path):
    """With threads in the starter, the ranks are no forks: all that they need is pickled."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "threads.py").write_text(
        "import sys, threading, time\n"
        "if __name__ == '__main__':\n"
        "    threading.Thread(target=time.sleep, args=(9999,), daemon=True).start()\n"
        "    from cos598d.commands.cli import main\n"
        "    sys.exit(main())\n"
    )
    words = ["train", *TINY_TRAINING, "--max_steps", 3, "--world_size", 2, "--sync", "own.py:Own", "--output_dir"]
    fresh = start("fresh", [tmp_path / "threads.py", *words, "fresh"], {"PYTHONPATH": str(ROOT)}, is_fresh=True)
    forks = start("forks", ["-m", "cos598d", *words, "forks"], {"PYTHONPATH": str(ROOT)})
    fresh.wait_for("iteration 1:")
    assert len(children_of(fresh.process.pid)) >= 2
    assert [fresh.wait(), forks.wait()] == [0, 0], fresh.text
    losses = [json.loads((tmp_path / name / "summary.json").read_text())["losses"] for name in ("fresh", "forks")]
    assert losses[0] == losses[1]
