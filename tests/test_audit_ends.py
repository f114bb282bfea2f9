"""Audits of scripts that end early or unevenly: their exit codes stay, and the steps until then are judged."""

import json
import os
import shutil
import signal
import time

import pytest
from audit_cases import CLIP
from audit_scripts import BY_HAND, audit, marked_line, with_changes
from programs import ROOT, children_of, is_alive, wait_until

from cos598d.commands.cli import main


def with_end(old, new):
    return with_changes("by_hand", [(old, new)])


BACKWARD, END = "    loss.backward()\n", "dist.destroy_process_group()"
ON_ONE = "    loss.backward()\n    if step == 4 and rank == 1:\n"
INDENTED = "".join(f"    {line}\n" for line in BY_HAND.splitlines())
SPAWNING = f"""
import os

import torch.multiprocessing as mp


def main(rank, ranks):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
{INDENTED}

if __name__ == "__main__":
    mp.spawn(main, (2,), nprocs=2)
"""
# A script, the exit codes of its ranks (None: any), and what rank 0 prints.
ENDS = {
    "at_once": ("import sys\nsys.exit(5)\n", [5, 5], "was not audited"),
    "no_group": ("print('no group')\n", [0, 0], "it opened no process group"),
    "spawns": (SPAWNING, None, "No fault found; gradients judged in 3 of 5 steps"),
    "crash": (
        with_end(BACKWARD, ON_ONE + "        raise ValueError('planted')\n"),
        [1, 1],
        "Rank 1 ended first, and the others for that, with exit code 1 (ValueError: planted, raised at train.py",
    ),
    "os_exit": (with_end(END, "import os\nos._exit(7)"), [7, 7], "exit code 7"),
    "megabytes": (with_end(END, f"print('x' * 3_000_000)\n{END}"), [0, 0], "No fault found"),
    "killed": (
        with_end(BACKWARD, ON_ONE + "        import os\n        os.kill(os.getpid(), 9)\n"),
        [1, -9],
        "was ended from outside",
    ),
}


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("name", ENDS)
def test_a_script_keeps_its_exit_code_and_its_steps_are_judged(name, tmp_path):
    source, wanted, says = ENDS[name]
    is_spawning = name == "spawns"
    codes, text, verdict = audit(tmp_path, source, ranks=1 if is_spawning else 2, is_fresh=is_spawning)
    assert says in text, text
    if wanted is not None:
        assert [code if code >= 0 else -9 for code in codes] == wanted, text
    if name in ("crash", "killed"):
        assert verdict["seen"]["judged"] == 3, text
        assert verdict["faults"] == [], text
    if name in ("at_once", "no_group"):
        assert verdict is None


GROUPS = """pair = dist.new_group([0, 1])
other = dist.new_group([2])
group = other if rank == 2 else pair
optimizer ="""
ON_GROUPS = [
    ("optimizer =", GROUPS),
    ("dist.all_reduce(p.grad)", "dist.all_reduce(p.grad, group=group)  # here"),
    ("p.grad /= ranks", "p.grad /= group.size()"),
    (CLIP, ""),
]
ONE_BROADCAST = "if rank == 0:\n    dist.broadcast(loss.detach(), 0)  # here\n"
# A source, its ranks, the fault, and the evidence. Rank 0 fails where it makes more calls than the other.
UNEVEN = {
    "groups of ranks": (with_changes("by_hand", ON_GROUPS), 3, "partial_average", "Of ranks 2 nothing is in it"),
    "more batches": (with_end("range(5)", "range(5 + (rank == 0))"), 2, "uneven_steps", "passes by rank: 6, 5."),
    "one call more": (with_end(END, ONE_BROADCAST + END), 2, "uneven_calls", "Calls of broadcast by rank: 5, 4."),
}


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("name", UNEVEN)
def test_the_audit_names_what_only_some_ranks_do(name, tmp_path):
    source, ranks, fault, evidence = UNEVEN[name]
    codes, text, verdict = audit(tmp_path, source, ranks=ranks)
    assert codes[1:] == [0] * (ranks - 1), text
    assert (codes[0] == 0) == (fault == "partial_average"), text
    (found,) = verdict["faults"]
    assert found["name"] == fault, text
    assert marked_line(source) in (None, found["line"]), text
    assert evidence in text


AFTER = "print('here', flush=True)\n"
# What ranks do after the last step, whether it is a hang, and what rank 0 prints.
HANGS = {
    "other_call": ("dist.broadcast(torch.zeros(7), 0)\n", True, "and broadcast of 7 elements at train.py"),
    "both_receive": ("dist.recv(torch.zeros(3), 1 - rank)\n", True, "Rank 1 has waited for rank 0"),
    "both_receive_later": (
        "import time\nwork = dist.irecv(torch.zeros(3), 1 - rank)\ntime.sleep(600)\n",
        False,
        "Rank 1 has waited for rank 0",
    ),
    "both_receive_and_wait_for_a_thread": (
        "import threading\nwork = dist.irecv(torch.zeros(3), 1 - rank)\nthreading.Event().wait(600)\n",
        False,
        "Rank 1 has waited for rank 0",
    ),
    "one_is_elsewhere": (
        "import time\nif rank:\n    time.sleep(600)\ndist.barrier()\n",
        False,
        "Rank 1 is in no call, at train.py",
    ),
    "one_goes_on": ("import time\nwhile True:\n    time.sleep(0.1)\n    dist.barrier()\n", False, ""),
}


@pytest.mark.long(one_in=6)
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_names_the_ranks_and_their_calls(name, tmp_path, capsys):
    after, is_hang, told = HANGS[name]
    source = with_end(END, AFTER + after + END)
    if name == "other_call":
        source = source.replace("in range(5)", "in range(5 + (rank == 0))").replace(AFTER, "if rank:\n    " + AFTER)
        source = source.replace(BACKWARD, "    if step == 5:\n        " + AFTER + BACKWARD)

    def stop(programs):
        for program in programs:
            program.wait_for("here")
        time.sleep(6)  # what has begun just now may be on its way, and a rank writes every two seconds
        for program in programs:
            program.process.terminate()

    codes, text, _ = audit(tmp_path, source, during=stop)
    assert all(code == -signal.SIGTERM for code in codes), text
    assert main(["audit", str(tmp_path / "audit")]) == 0  # what each rank has written last
    text, verdict = capsys.readouterr().out, json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert [each["name"] for each in verdict["faults"]] == (["hang"] if is_hang else []), text
    assert "was ended from outside, or still runs, at train.py line" in " ".join(text.split())
    assert told in " ".join(text.split()), text
    assert is_hang or "Cannot tell" in text, text


@pytest.mark.long
def test_a_script_that_takes_too_long_is_stopped_and_judged(start, tmp_path):
    (tmp_path / "train.py").write_text(with_end(END, "import time\ntime.sleep(600)\n"))
    words = ["-m", "cos598d", "audit", "--world_size", 2, "--timeout", 20, "--output_dir", "audit", "train.py"]
    program = start("audit", words, {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 124, program.text
    assert "was ended from outside, or still runs, at train.py line" in " ".join(program.text.split())
    assert "Cannot tell" in program.text


@pytest.mark.skipif(not shutil.which("setpriv"), reason="nothing asks the kernel to end a killed program's children")
def test_ranks_end_when_their_audit_is_killed(start, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\npathlib.Path(os.environ['RANK'] + '.here').touch()\ntime.sleep(600)\n"
    )
    words = ["-m", "cos598d", "audit", "--world_size", "2", "--output_dir", tmp_path / "audit", tmp_path / "train.py"]
    starter = start("audit", words, {"PYTHONPATH": str(ROOT)})
    wait_until(lambda: all((tmp_path / f"{rank}.here").exists() for rank in range(2)))
    ranks = children_of(starter.process.pid)
    assert len(ranks) >= 2
    starter.stop()
    try:
        wait_until(lambda: not any(map(is_alive, ranks)))
    finally:
        for pid in filter(is_alive, ranks):
            os.kill(pid, signal.SIGKILL)
