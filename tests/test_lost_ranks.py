"""A lost rank: the others name it and end, their processes too; what an engine lacks ends all ranks alike."""

import json
import os
import re
import signal

import pytest
from programs import ROOT, TINY_TRAINING, children_of, free_port, is_alive, script, wait_until, worker_of_rank
from test_faults import LONG, TASK2B, ends_in_a_sentence, left_its_rows

from cos598d.world import watchdog
from cos598d.world.exit import lost_rank


def all_end(others, victim, started, folder, least=3):
    """The other ranks name the victim; what was started has ended, and only the rows so far are left, of `least`."""
    for rank in others:
        ends_in_a_sentence(rank, f"lost connection to rank {victim}", exit_code=1)
    wait_until(lambda: not any(is_alive(child) for child in started))
    left_its_rows(folder, least)


@pytest.mark.parametrize(
    ("path", "victim", "words"),
    [
        (TASK2B, 0, ()),
        (TASK2B, 2, ()),
        ("task2a/run_glue.py", 2, ()),
        ("task3/run_glue.py", 0, ()),
        *((TASK2B, 1, ("--sync", name)) for name in ("zero1", "sparse_zero1", "zero2", "zero3", "shared_weights")),
    ],
)
def test_ranks_end_when_one_is_killed(start_ranks, tmp_path, path, victim, words):
    ranks = start_ranks(path, 3, [*LONG, *words, "--output_dir", "out"])
    ranks[victim].wait_for("iteration 5:")
    started = [child for rank in ranks for child in children_of(rank.process.pid)]
    ranks[victim].process.send_signal(signal.SIGKILL)
    all_end([rank for rank in ranks if rank is not ranks[victim]], victim, started, tmp_path / "out", least=5)
    (attempt,) = json.loads((tmp_path / "out" / "live" / "attempts.json").read_text())["attempts"]
    if victim:  # rank 0 writes it down
        assert attempt["why"] == lost_rank(victim)
        assert attempt["to_iteration"] >= 5
    else:
        assert attempt["why"] is None


# Fragments set out after every second step, and arrive after the second one from there.
DYING = """
import os, signal
from cos598d.sync.diloco import DiLoCo

class Dying(DiLoCo):
    def after_step(self):
        self.die_where({steps}, "before")
        super().after_step()
        self.die_where({steps}, "after")

    def die_where(self, steps, place):
        if (self.comm.rank, self._steps, place) == (1, steps, "{place}"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("steps", "place"),
    [(19, "before"), (20, "after"), (21, "before")],
    ids=["others have set out", "all have set out", "it should arrive"],
)
def test_ranks_end_when_one_is_killed_while_a_fragment_travels(start_ranks, tmp_path, steps, place):
    (tmp_path / "dying.py").write_text(DYING.format(steps=steps, place=place))
    words = [*TINY_TRAINING, "--sync", f"{tmp_path}/dying.py:Dying", "--sync_every", 2, "--fragments", 2]
    ranks = start_ranks(TASK2B, 3, [*words, "--max_steps", 100000, "--output_dir", "out"])
    others = [ranks[0], ranks[2]]
    for rank in others:
        rank.wait_for("iteration 3:")
    started = [child for rank in others for child in children_of(rank.process.pid)]
    assert ranks[1].wait() == -signal.SIGKILL
    all_end(others, 1, started, tmp_path / "out")


# Read by Python before the program: packages that are not there, too old, or broken.
WITHOUT = """
import importlib.metadata, sys
real, said = importlib.metadata.version, {said}
def version(name):
    if name not in said:
        return real(name)
    if said[name] is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return said[name]
importlib.metadata.version = version
for name in said:
    sys.modules[name] = None
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("sync", "said", "code", "sentence"),
    [
        ("deepspeed", {"deepspeed": None}, 2, "--sync deepspeed needs DeepSpeed, which is not installed. Run `make en"),
        ("fabric", {"lightning": "2.4.9"}, 2, "--sync fabric needs Lightning Fabric 2.5 or newer, and 2.4.9 is inst"),
        ("horovod", {"horovod": None}, 2, "--sync horovod needs Horovod, which is not installed. Run `make engines`."),
        ("horovod", {"horovod": "0.28.1"}, 1, "Horovod is installed but cannot be imported (No module named"),
    ],
)
def test_every_rank_names_an_engine_that_is_missing_too_old_or_broken(start, tmp_path, sync, said, code, sentence):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(said=said))
    words = [*TINY_TRAINING, "--sync", sync, "--max_steps", 2, "--output_dir", tmp_path / "out", "--no_cuda"]
    place = ["--master_port", free_port(), "--world_size", 2, "--local_rank"]
    places = [[*place, rank] for rank in range(2)] if sync == "deepspeed" else [[]]  # all look in the same way
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ranks = [start(f"rank{rank}", [script(TASK2B), *words, *place], environ) for rank, place in enumerate(places)]
    for rank in ranks:
        ends_in_a_sentence(rank, sentence, code)


def test_the_advice_after_a_killed_rank_resumes_the_run(start_ranks):
    """As it is printed, without --output_dir too."""
    flags = [*LONG, "--save_steps", 1]
    ranks = start_ranks(TASK2B, 2, flags)
    ranks[0].wait_for("iteration 3:")
    ranks[1].process.send_signal(signal.SIGKILL)
    ends_in_a_sentence(ranks[0], "lost connection to rank 1", exit_code=1)
    advice = re.search(r"repeat the command on every rank, with (--resume \S+) if", ranks[0].text)[1]
    again = start_ranks(TASK2B, 2, [*flags, *advice.split()])
    again[0].wait_for(r"iteration [3-9]\d*:|iteration \d\d+:")
    assert "iteration 1:" not in again[0].text


def test_local_workers_end_when_their_starter_is_killed(start):
    program = start("starter", [script(TASK2B), *LONG, "--world_size", 2])
    program.wait_for("iteration 5:")
    workers = children_of(program.process.pid)
    assert len(workers) >= 2
    program.process.kill()
    assert program.wait() == -signal.SIGKILL, program.text
    wait_until(lambda: not any(is_alive(worker) for worker in workers))
    assert "Traceback" not in program.text, program.text


def test_a_killed_local_worker_is_named_and_the_starter_fails(start):
    program = start("starter", [script(TASK2B), *LONG, "--world_size", 2])
    program.wait_for("iteration 5:")
    os.kill(worker_of_rank(program.process.pid, 1), signal.SIGKILL)
    assert program.wait() > 0
    assert "rank 0: lost connection to rank 1" in program.text
    assert "Traceback" not in program.text


@pytest.mark.parametrize(
    ("unheard", "linked", "interface", "named"),
    [
        (
            True,
            False,
            "eth0",
            "lost connection to this rank, 2: its network interface eth0 has no link. Check that network.",
        ),
        (True, True, "eth0", "lost connection to rank 0: "),  # nothing came, and it is not for want of a link here
        (False, False, "eth0", "lost connection to rank 0: "),  # word came that the peer is gone, so there is a way
        (True, False, None, "lost connection to rank 0: "),  # it could never be told whether there is a link
    ],
)
def test_a_rank_names_itself_only_when_no_word_came_and_its_link_is_gone(
    unheard, linked, interface, named, monkeypatch
):
    mine = object.__new__(watchdog.Watchdog)
    mine.rank, mine._finished, mine._interface, said = 2, set(), interface, []
    monkeypatch.setattr(mine, "_tell", lambda message, but: None)
    monkeypatch.setattr(watchdog, "has_link", lambda _: linked)
    monkeypatch.setattr(mine, "_end", said.append)
    mine._on_end(0, unheard)
    assert said[0].startswith(named)
