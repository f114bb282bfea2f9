"""A check supervises its ranks: their output and files are limited, and all that they start ends with them."""

import gc
import os
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest
from programs import PATIENCE, ROOT, wait_until

from cos598d.tools.check.spawn import DIED, LATE, RETURNED, run_world
from cos598d.tools.check.supervisor import MOST_FILE_BYTES, OUTPUT_BYTES

AVERAGES = """
import os, subprocess, sys, tempfile, time
from pathlib import Path
from cos598d.sync.all_reduce import AllReduce

HERE = Path(__file__).parent

class Mine(AllReduce):
    def finish(self):
        {does}
        super().finish()
"""
WORDS = ["-m", "cos598d", "check", "mine.py:Mine", "--no_speed", "--world_sizes", "2", "--claims", "averages_gradients"]
# As a terminal does: Ctrl-C comes to all of a group, so many seconds after the program's first line.
INTERRUPTED = """
import os, runpy, signal, sys, threading
os.setpgrp()
timer = threading.Timer(float(sys.argv.pop(1)), os.killpg, (0, signal.SIGINT))
timer.daemon = True
timer.start()
runpy.run_module("cos598d", run_name="__main__", alter_sys=True)
"""
# In a program of its own: what tracks resources warns when the last process that could use them has ended, and those
# that other tests have started could too.
LEAVES_A_LOCK = """
import multiprocessing, os
from multiprocessing import forkserver, resource_tracker
from cos598d.tools.check.spawn import run_world

def leave_a_lock(comm):
    lock = multiprocessing.Lock()
    lock.acquire()
    os._exit(0)

if __name__ == "__main__":
    forkserver.set_forkserver_preload([])
    (end,) = run_world(1, leave_a_lock, seconds=60)
    print(end.how)
    resource_tracker._resource_tracker._stop()  # here it would warn of what is left
"""


def write_sync(folder, does):
    (folder / "mine.py").write_text(AVERAGES.format(does=does))


def print_for_ever(comm):
    while True:
        print("all work and no play " * 1000)


def fill_the_disk(comm):
    with open("large", "wb") as file:
        for _ in range(MOST_FILE_BYTES >> 20):
            file.write(bytes(1 << 20))
        try:
            file.write(bytes(1 << 20))
            file.flush()
        except OSError as error:
            return error.strerror
    return "no end"


def start_daemons(comm, path):
    """A child in a session of its own, and a grandchild whose parent is gone."""
    for is_orphan in (False, True):
        if os.fork() == 0:
            os.setsid()
            if is_orphan and os.fork():
                os._exit(0)
            with open(path, "a") as pids:
                pids.write(f"{os.getpid()}\n")
            time.sleep(600)
            os._exit(0)
    while len(Path(path).read_text().splitlines() if Path(path).exists() else ()) < 2 * comm.world_size:
        time.sleep(0.02)


def test_output_of_a_rank_is_cut_to_its_end():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (end,) = run_world(1, print_for_ever, seconds=2)
    assert end.how == LATE
    assert 0 < len(end.output) <= OUTPUT_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_file_of_a_rank_has_a_size_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (end,) = run_world(1, fill_the_disk, seconds=PATIENCE)
    assert (end.how, end.value) == (RETURNED, "File too large")


def test_processes_started_by_ranks_end_with_them(tmp_path):
    ends = run_world(2, start_daemons, str(tmp_path / "pids"), seconds=PATIENCE)
    assert [end.how for end in ends] == [RETURNED, RETURNED]
    pids = [int(line) for line in (tmp_path / "pids").read_text().splitlines()]
    assert len(pids) == 4
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_lock_left_by_a_rank_gives_no_leak_warning(start, tmp_path):
    (tmp_path / "script.py").write_text(LEAVES_A_LOCK)
    program = start("script", [tmp_path / "script.py"], {"PYTHONPATH": str(ROOT)}, is_fresh=True)
    assert program.wait() == 0, program.text
    assert program.text == f"{DIED}\n"


def folders_in(place):
    return [path.name for path in place.iterdir() if path.is_dir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_check_that_is_ended_leaves_no_process_and_no_folder(start, tmp_path, number):
    write_sync(tmp_path, '(HERE / f"pid{self.comm.rank}").write_text(str(os.getpid())); time.sleep(600)')
    program = start("check", WORDS, {"PYTHONPATH": str(ROOT)})
    pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids))
    program.process.send_signal(number)
    assert program.wait() == (128 + number if number == signal.SIGTERM else -number)
    assert number == signal.SIGKILL or not folders_in(tmp_path)
    wait_until(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids))
    wait_until(lambda: not folders_in(tmp_path))


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("seconds", [0.6, 1.5, 4])
def test_ctrl_c_gives_one_line_at_any_time(start, tmp_path, seconds):
    write_sync(tmp_path, "time.sleep(600)")
    program = start("check", ["-c", INTERRUPTED, seconds, *WORDS[2:]], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 128 + signal.SIGINT, program.text
    said = [line for line in program.text.splitlines() if line]
    assert said[-1] == "interrupted (Ctrl-C)."
    assert said[:-1] in ([], ["mine.py:Mine on 2 ranks"])
    wait_until(lambda: not folders_in(tmp_path))


def collects(comm):
    return gc.isenabled() and gc.get_freeze_count() > 100_000


def test_ranks_collect_garbage_though_their_server_does_not():
    assert [end.value for end in run_world(2, collects, seconds=60)] == [True, True]
