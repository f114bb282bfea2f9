"""A rank that dies is named on every other rank within seconds, one that is stopped or stuck within --timeout."""

import json
import os
import re
import signal
import socket
import time

import psutil
import pytest
from programs import ROOT, TINY_TRAINING, children_of, free_port, is_alive, script, wait_until, worker_of_rank

LONG = (*TINY_TRAINING, "--max_steps", "100000", "--monitor_interval", "0")
TASK2B = "task2b/run_glue.py"
LOST = "lost connection to rank {rank}: it was killed, or its host is down."
SECONDS = 20  # within which a killed rank must be known, on a busy machine; by itself it takes one


def sentences(text):
    """The error of each rank in the output of a command, by rank."""
    found = re.findall(r"^error: (?:rank (\d): )?(.*)$", text, re.MULTILINE)
    return {int(rank) if rank else None: words for rank, words in found}


def end_with(programs, words, began, seconds=SECONDS, code=1):
    """All end with this exit code in this time. Each prints one line with these words, and no traceback."""
    for program in programs:
        assert program.wait(seconds) == code, program.text
        assert "Traceback" not in program.text, program.text
        (said,) = sentences(program.text).values()
        assert words in said, program.text
    assert time.monotonic() - began < seconds


@pytest.mark.long(one_in=2)
@pytest.mark.parametrize("rank", [2, 0])
def test_a_killed_rank_of_one_command_is_named_by_all_others(start, rank):
    program = start("launcher", [script(TASK2B), *LONG, "--world_size", 3])
    program.wait_for("iteration 2:")
    began = time.monotonic()
    os.kill(worker_of_rank(program.process.pid, rank), signal.SIGKILL)
    assert program.wait(SECONDS) == 137, program.text
    assert time.monotonic() - began < SECONDS
    assert sentences(program.text).keys() == {0, 1, 2} - {rank}
    assert all(LOST.format(rank=rank) in words for words in sentences(program.text).values()), program.text
    assert program.text.rstrip().endswith(f"rank {rank} was ended by SIGKILL.")
    assert "[W" not in program.text, "torch's store has complained"


KILLED, STOPPED = LOST.format(rank="{rank}"), "rank {rank} did not take part (stopped, or stuck?)"


@pytest.mark.long(one_in=2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, KILLED), (signal.SIGSTOP, STOPPED)])
def test_a_killed_or_stopped_rank_of_three_shells_is_named_by_both_others(start_ranks, number, said, rank):
    timeout = 0 if number == signal.SIGKILL else 10
    ranks = start_ranks(TASK2B, 3, [*LONG, "--timeout", timeout or 60])
    ranks[0].wait_for("iteration 2:")
    began = time.monotonic()
    os.kill(ranks[rank].process.pid, number)
    end_with([one for one in ranks if one is not ranks[rank]], said.format(rank=rank), began, timeout + SECONDS)
    ranks[rank].process.send_signal(signal.SIGCONT)
    assert ranks[rank].wait() != 0  # if stopped, it hears what happened


CROSSED = """
import torch
import torch.distributed as dist
from cos598d.sync.base import GradientSync


class Crossed(GradientSync):
    def average(self, *_):
        dist.recv(torch.zeros(4), src=1 - dist.get_rank())
"""


def test_ranks_that_wait_for_each_other_say_so_after_the_timeout(start, tmp_path):
    (tmp_path / "own.py").write_text(CROSSED)
    words = [*LONG, "--sync", "own.py:Crossed", "--timeout", 6, "--world_size", 2]
    program = start("launcher", ["-m", "cos598d", "train", *words], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 1
    words = "a collective failed: all ranks wait for each other, in different collectives."
    assert any(said.endswith(words) for said in sentences(program.text).values()), program.text


@pytest.mark.long
def test_ranks_end_with_their_launcher(start):
    program = start("launcher", [script(TASK2B), *LONG, "--world_size", 3])
    program.wait_for("iteration 2:")
    ranks = children_of(program.process.pid)
    assert len(ranks) == 3
    program.process.kill()
    wait_until(lambda: not any(map(is_alive, ranks)), SECONDS)
    assert "the program that started this worker has ended" in program.text


@pytest.mark.long
def test_a_second_rank_of_one_number_is_told_and_the_run_goes_on(start, start_ranks):
    port = free_port()
    ranks = start_ranks(TASK2B, 2, LONG, port=port)
    ranks[0].wait_for("iteration 2:")
    place = ["--master_port", port, "--world_size", 2, "--local_rank", 1]
    again = start("again", [script(TASK2B), *LONG, *place])
    assert again.wait() == 1
    assert f"rank 1 was started twice for 127.0.0.1:{port}" in again.text
    done = len(ranks[0].text.splitlines())
    assert all(one.process.poll() is None for one in ranks)
    ranks[1].process.send_signal(signal.SIGTERM)
    assert [one.wait() for one in ranks] == [75, 75], ranks[0].text[done:]


def test_a_run_listens_on_loopback_only_and_a_stranger_does_not_disturb_it(start):
    program = start("launcher", [script(TASK2B), *LONG, "--world_size", 2])
    program.wait_for("iteration 2:")
    rank = psutil.Process(worker_of_rank(program.process.pid, 0))
    listening = [one.laddr for one in rank.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert listening
    assert {place.ip for place in listening} == {"127.0.0.1"}
    for place in listening:
        with socket.create_connection(place) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    seen = len(program.text)
    wait_until(lambda: "iteration" in program.text[seen:] or program.process.poll() is not None)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 75, program.text


@pytest.mark.long
def test_a_rank_with_another_secret_is_refused_by_all(start):
    port, words = free_port(), [script(TASK2B), *LONG, "--world_size", 3]
    ranks = [
        start(f"rank{rank}", [*words, "--master_port", port, "--local_rank", rank], {"COS598D_SECRET": secret})
        for rank, secret in enumerate(["ours", "ours", "theirs"])
    ]
    end_with(ranks, "rank 2 has another COS598D_SECRET than rank 0", time.monotonic(), 180)


@pytest.mark.long
def test_a_lost_rank_of_torchrun_is_named_and_the_run_restarts_from_its_checkpoint(start, tmp_path):
    words = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--max_restarts", 1, "--master_port", free_port()]
    steps = [*TINY_TRAINING, "--max_steps", 60, "--save_steps", 1, "--log_every", 1]
    words += [script(TASK2B), *steps, "--output_dir", "out", "--resume", "auto"]
    program = start("torchrun", words, is_fresh=True)
    program.wait_for("iteration 8:")
    os.kill(worker_of_rank(program.process.pid, 1), signal.SIGKILL)
    assert program.wait() == 0, program.text
    assert LOST.format(rank=1) in sentences(program.text)[0], program.text
    assert "resumes after iteration" in program.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["losses"]) == 60, "each row is on the disk before the checkpoint after it is complete"
