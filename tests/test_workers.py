"""A rank that is forked from its starter is like one in a fresh interpreter."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from programs import ROOT, TINY_TRAINING, Program, children_of, programs_end, script

from cos598d.commands import train
from cos598d.commands.cli import main
from cos598d.world import devices, workers

# Three forks print facts about themselves. Then the second is killed. With "threads" a thread prevents forks.
SCRIPT = """
import contextlib, json, os, signal, sys, threading, time

os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.pop("OMP_NUM_THREADS", None)  # so that OpenMP thinks of all cores
import torch
from cos598d.world.launch import start_local_workers

os.environ["TORCHELASTIC_RUN_ID"] = "another's"
signal.signal(signal.SIGUSR2, lambda *_: None)
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
print("the starter's own line", end=" ")  # in its buffer while it forks
if sys.argv[1:] == ["threads"]:
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()

def opened():
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            yield os.readlink(f"/proc/self/fd/{descriptor}")

def tell():
    rank, descriptor = int(os.environ["RANK"]), os.environ.get("COS598D_LISTENER")
    numbers = ("SIGTERM", "SIGUSR2", "SIGQUIT", "SIGPIPE")
    facts = {
        "session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "signals": [str(signal.getsignal(getattr(signal, name))) for name in numbers],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "environment": {name: value for name, value in os.environ.items() if name in NAMES},
        "sockets": len([path for path in opened() if "socket" in path]),
        "listens": descriptor is not None and "socket" in os.readlink(f"/proc/self/fd/{descriptor}"),
        "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
    }
    torch.set_num_threads(2)
    facts["sum"] = float(torch.ones(1 << 20).mul(2).sum())
    facts["threads"] += [len(os.listdir("/proc/self/task"))]
    sys.stdout.write(f"\\n{json.dumps(facts)}\\n")  # one call, and no flush
    open(f"told{rank}", "w").close()
    while not all(os.path.exists(f"told{each}") for each in range(3)):
        time.sleep(0.01)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0 if rank == 0 else 60)
    return 0

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")
if "RANK" in os.environ:
    print("fresh")
    sys.exit(3)
sys.exit(start_local_workers(3, None, [], be_rank=tell))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The facts of three forks by rank, and the output and exit code of their starter."""
    folder = tmp_path_factory.mktemp("forks")
    (folder / "script.py").write_text(SCRIPT)
    with programs_end():
        program = Program(folder, "starter", [str(folder / "script.py")], {"PYTHONPATH": str(ROOT)}, is_fresh=True)
        code = program.wait()
    facts = [json.loads(line) for line in program.text.splitlines() if line.startswith("{")]
    return {int(one["environment"]["RANK"]): one for one in facts}, program.text, code


def test_a_fork_has_its_own_session_default_signals_and_environment(told):
    facts, text, _ = told
    assert set(facts) == {0, 1, 2}, text
    for rank, one in facts.items():
        assert (one["session"], one["interrupt"], one["blocked"]) == (True, True, [])
        default, ignored = str(signal.SIG_DFL), str(signal.SIG_IGN)
        assert one["signals"] == [default, default, ignored, ignored]  # Python ignores SIGPIPE from its first line on
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        assert one["environment"] == expected | {"OMP_NUM_THREADS": "1"}


def test_only_rank_0_inherits_the_listening_socket(told):
    facts, text, _ = told
    assert [facts[rank]["listens"] for rank in range(3)] == [True, False, False]
    assert [facts[rank]["sockets"] for rank in range(3)] == [1, 0, 0], text


def test_a_fork_computes_in_one_thread_and_can_use_more(told):
    facts, _, _ = told
    for one in facts.values():
        assert one["threads"] == [1, 1, 2]
        assert one["sum"] == 2 << 20


def test_a_fork_does_not_repeat_its_starter_s_output(told):
    """Also those of a killed fork."""
    _, text, _ = told
    assert text.count("the starter's own line") == 1


def test_a_killed_fork_is_named_and_ends_the_others(told):
    _, text, code = told
    assert code == 128 + signal.SIGKILL
    assert text.rstrip().endswith("rank 1 was ended by SIGKILL."), text


@pytest.mark.long
def test_a_starter_with_threads_does_not_fork(start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    program = start("starter", [tmp_path / "script.py", "threads"], {"PYTHONPATH": str(ROOT)}, is_fresh=True)
    assert program.wait() == 3, program.text
    assert "fresh" in program.text


@pytest.mark.parametrize(
    ("kind", "files", "may"),
    [
        (None, ["null", "nvidia0"], False),  # torch itself knows no GPU
        ("cuda", ["null", "nvme0"], False),
        ("cuda", ["null", "nvidiactl"], True),
        ("hip", ["kfd", "null"], True),
        ("hip", ["nvidia0"], False),
    ],
)
def test_a_starter_with_a_gpu_does_not_fork(monkeypatch, kind, files, may):
    for name in devices.DEVICE_FILES:
        monkeypatch.setattr(torch.version, name, "12.8" if name == kind else None, raising=False)
    tasks = {"/dev": files, "/proc/self/task": ["1"]}
    monkeypatch.setattr(os, "listdir", tasks.__getitem__)
    assert devices.may_have_gpu() is may
    assert workers.may_fork() is not may


@pytest.mark.parametrize(
    ("sync", "forks"), [("ddp", True), ("zero1", True), ("torch_fsdp", False), ("own.py:Own", False)]
)
def test_other_people_s_code_starts_in_a_fresh_interpreter(monkeypatch, tmp_path, sync, forks):
    """It may read its rank on import, and the starter has imported it without one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from cos598d.sync.flat import Flat\n\n\nclass Own(Flat):\n    pass\n")
    asked = []
    monkeypatch.setattr(train, "may_fork", lambda: True)
    monkeypatch.setattr(train, "start_local_workers", lambda *_, be_rank: asked.append(be_rank) or 0)
    assert main(["train", *TINY_TRAINING, "--world_size", "2", "--sync", sync]) == 0
    assert [be_rank is not None for be_rank in asked] == [forks]


def test_the_starter_reports_an_error_once_and_starts_no_rank(start):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--world_size", 2, "--data_dir", "nowhere"]
    program = start("starter", words)
    assert program.wait() == 1
    assert program.text.startswith("error: the data folder nowhere is not a folder. "), program.text
    assert len(program.text.splitlines()) == 1


def test_a_training_forks_its_ranks(start):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", 100000, "--world_size", 2]
    program = start("starter", words, is_fresh=True)
    program.wait_for("iteration 3:")
    names = sorted(Path(f"/proc/{worker}/comm").read_text().strip() for worker in children_of(program.process.pid))
    assert names == ["rank 0", "rank 1"]
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 75, program.text
