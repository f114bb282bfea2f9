"""What learn, check and grade start ends with them, also when they are killed at any moment."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
from programs import ROOT, wait_until

from cos598d.tools.grade.processes import SCRATCH, remove_left_folders

MARK = "COS598D_TEST_MARK"  # a variable that everything inherits which a program starts
ENDLESS = """# cos598d lesson 3
import time
def average(comm, gradient, name):
    while True:
        time.sleep(0.1)
"""
SYNC = """
import time
from cos598d.sync.all_reduce import AllReduce

class Mine(AllReduce):
    def finish(self):
        time.sleep(600)
"""


def start(words, folder):
    """A program in a fresh interpreter, and the mark of all that it starts."""
    mark = uuid.uuid4().hex
    environ = os.environ | {MARK: mark, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    output = (folder / "output.txt").open("w")
    command = [sys.executable, "-m", "cos598d", *map(str, words)]
    with output:
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=folder, env=environ), mark


def marked(mark, word=""):
    """The processes that have the mark, and `word` in their command line, without those that wait to be collected."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(MARK) == mark and word in " ".join(process.cmdline())
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def write(folder):
    (folder / "lesson3.py").write_text(ENDLESS)
    (folder / "mine.py").write_text(SYNC)
    (folder / "class" / "ann").mkdir(parents=True)
    (folder / "class" / "ann" / "lesson3.py").write_text(ENDLESS)
    (folder / "lab.toml").write_text(f'kind = "lesson"\nlesson = 3\nseconds = 300\nenvironment = ["{MARK}"]\n')


WORDS = {
    "learn": ["learn", 3, "--check"],
    "check": ["check", "mine.py:Mine", "--no_speed", "--world_sizes", 2],
    "grade": ["grade", "class", "--assignment", "lab.toml", "--csv", "grades.csv", "--as_root"],
}


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("name", WORDS)
def test_a_command_killed_while_ranks_run_leaves_no_process_and_no_folder(name, tmp_path):
    write(tmp_path)
    program, mark = start(WORDS[name], tmp_path)
    # The command, the server, a supervisor and two ranks; the judge of a submission is one more.
    wait_until(lambda: len(marked(mark)) >= 5 + (name == "grade") or program.poll() is not None)
    assert program.poll() is None, (tmp_path / "output.txt").read_text()
    # A submission's processes have their temporary files in its scratch folder.
    scratch = {Path(each.environ()["TMPDIR"]).parent for each in marked(mark)}
    scratch = {folder for folder in scratch if folder.name.startswith(SCRATCH)}
    assert len(scratch) == (name == "grade")
    remove_left_folders()
    assert all(folder.is_dir() for folder in scratch)  # they are in use
    program.kill()
    program.wait()
    wait_until(lambda: not marked(mark))
    remove_left_folders()  # as the next start of `grade` does
    assert not any(folder.exists() for folder in scratch)


@pytest.mark.parametrize("seconds", [0.4, 1.2])
def test_a_command_killed_while_its_server_loads_leaves_no_process(seconds, tmp_path):
    """Python's own server would go on loading, and look only then."""
    write(tmp_path)
    program, mark = start(WORDS["learn"], tmp_path)
    time.sleep(seconds)
    program.kill()
    program.wait()
    wait_until(lambda: not marked(mark))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server ends when it has loaded")
def test_the_server_ends_with_its_starter_although_its_pipe_is_held(tmp_path):
    """A process that is left over has a copy of all descriptors, and so the pipe by which Python's server is ended."""
    code = (
        "import os, sys, time\n"
        "from cos598d.tools.check.spawn import start_server\n"
        "start_server()\n"
        "if os.fork() == 0:\n"
        "    time.sleep(600)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    mark = uuid.uuid4().hex
    environ = os.environ | {MARK: mark, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not marked(mark, "forkserver"))
    left = marked(mark)
    assert left  # the one that holds the pipe
    for process in left:
        process.kill()
    wait_until(lambda: not marked(mark))
