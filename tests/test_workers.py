"""A rank that is a fork of its starter is what a fresh interpreter would be."""

import json
import os
import signal

import pytest
import torch
from programs import ROOT, TINY_TRAINING, children_of, script

from cos598d.commands import train
from cos598d.commands.cli import main
from cos598d.world import devices, workers

# Three forks tell what they are; the second is killed when all have, and a thread forbids to fork where a word says so.
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
    """What three forks tell of themselves, by rank, and the end of their starter: (facts, its text, its exit code)."""
    from programs import Program

    folder = tmp_path_factory.mktemp("forks")
    (folder / "script.py").write_text(SCRIPT)
    program = Program(folder, "starter", [str(folder / "script.py")], {"PYTHONPATH": str(ROOT)}, is_fresh=True)
    try:
        code = program.wait()
    finally:
        program.stop()
    facts = [json.loads(line) for line in program.text.splitlines() if line.startswith("{")]
    return {int(one["environment"]["RANK"]): one for one in facts}, program.text, code


def test_a_fork_has_a_session_the_signals_and_the_environment_of_a_new_program(told):
    facts, text, _ = told
    assert set(facts) == {0, 1, 2}, text
    for rank, one in facts.items():
        assert (one["session"], one["interrupt"], one["blocked"]) == (True, True, [])
        default, ignored = str(signal.SIG_DFL), str(signal.SIG_IGN)
        assert one["signals"] == [default, default, ignored, ignored]  # Python ignores SIGPIPE from its first line on
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        assert one["environment"] == expected | {"OMP_NUM_THREADS": "1"}


def test_rank_0_alone_inherits_the_endpoint(told):
    facts, text, _ = told
    assert [facts[rank]["listens"] for rank in range(3)] == [True, False, False]
    assert [facts[rank]["sockets"] for rank in range(3)] == [1, 0, 0], text


def test_a_fork_computes_in_one_thread_and_then_in_as_many_as_it_is_told(told):
    facts, _, _ = told
    for one in facts.values():
        assert one["threads"] == [1, 1, 2]
        assert one["sum"] == 2 << 20


def test_a_forks_lines_are_printed_at_once_and_its_starters_once(told):
    """Those of a killed one too."""
    _, text, _ = told
    assert text.count("the starter's own line") == 1


def test_a_killed_fork_is_named_and_ends_the_others(told):
    _, text, code = told
    assert code == 128 + signal.SIGKILL
    assert text.rstrip().endswith("rank 1 was ended by SIGKILL."), text


@pytest.mark.long
def test_beside_a_thread_nothing_is_forked(start, tmp_path):
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
def test_where_there_may_be_a_gpu_nothing_is_forked(monkeypatch, kind, files, may):
    for name in devices.DEVICE_FILES:
        monkeypatch.setattr(torch.version, name, "12.8" if name == kind else None, raising=False)
    tasks = {"/dev": files, "/proc/self/task": ["1"]}
    monkeypatch.setattr(os, "listdir", tasks.__getitem__)
    assert devices.may_have_gpu() is may
    assert workers.may_fork() is not may


@pytest.mark.parametrize(
    ("sync", "forks"), [("ddp", True), ("zero1", True), ("torch_fsdp", False), ("own.py:Own", False)]
)
def test_code_of_others_begins_in_a_fresh_interpreter(monkeypatch, tmp_path, sync, forks):
    """It may read its rank when it is imported, and the starter has imported it as nobody."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from cos598d.sync.flat import Flat\n\n\nclass Own(Flat):\n    pass\n")
    asked = []
    monkeypatch.setattr(train, "may_fork", lambda: True)
    monkeypatch.setattr(train, "start_local_workers", lambda *_, be_rank: asked.append(be_rank) or 0)
    assert main(["train", *TINY_TRAINING, "--world_size", "2", "--sync", sync]) == 0
    assert [be_rank is not None for be_rank in asked] == [forks]


def test_what_the_starter_finds_wrong_it_says_once_and_starts_nobody(start, tmp_path):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--world_size", 2, "--data_dir", "nowhere"]
    program = start("starter", words)
    assert program.wait() == 1
    assert program.text.startswith("error: the data folder nowhere is not a folder. "), program.text
    assert len(program.text.splitlines()) == 1


def test_a_training_forks_its_ranks(start):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", 100000, "--world_size", 2]
    program = start("starter", words, is_fresh=True)
    program.wait_for("iteration 3:")
    names = []
    for worker in children_of(program.process.pid):
        with open(f"/proc/{worker}/comm") as file:
            names.append(file.read().strip())
    assert sorted(names) == ["rank 0", "rank 1"]
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 75, program.text
