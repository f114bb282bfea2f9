"""Programs that are started one after the other, or some at once: their logs, their exit codes, signals."""

import os
import signal
import sys
import threading

import pytest
from programs import wait_until

from cos598d.errors import UserError
from cos598d.terminal.signals import AskedToEnd
from cos598d.tools.runs.jobs import Job, LastWords, run_jobs


def jobs_of(folder, *scripts):
    return [
        Job(f"job{place}", [sys.executable, "-c", script], folder / "logs" / f"job{place}.txt")
        for place, script in enumerate(scripts)
    ]


def test_each_program_has_its_log_and_its_exit_code(tmp_path):
    told = []
    broken, killed = "import sys; print('two'); sys.exit('it is broken')", "import os; os.kill(os.getpid(), 9)"
    jobs = jobs_of(tmp_path, "print('one')", broken, killed)
    run_jobs(jobs, 1, lambda job: told.append(job.place), lambda job, ended: told.append((ended.code, ended.last)))
    assert told == ["job0", (0, "one"), "job1", (1, "it is broken"), "job2", (137, "")]
    assert jobs[0].log.read_text().splitlines()[1:] == ["one"]
    # Another start of one is added, and only its words are its own.
    told.clear()
    run_jobs([Job("job0", ["true"], jobs[0].log)], 1, lambda job: None, lambda job, ended: told.append(ended.last))
    assert told == [""]
    assert [line.split()[0] for line in jobs[0].log.read_text().splitlines()] == ["$", "one", "$"]


def test_as_many_run_at_once_as_are_asked_for(tmp_path):
    running, most = set(), []

    def begin(job):
        running.add(job.place)
        most.append(len(running))

    jobs = jobs_of(tmp_path, *["import time; time.sleep(0.3)"] * 5)
    run_jobs(jobs, 3, begin, lambda job, ended: running.remove(job.place))
    assert max(most) == 3
    assert running == set()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, AskedToEnd), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_reaches_all_running_programs_and_starts_no_other(number, error, tmp_path):
    script = (
        "import signal, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    jobs, ends = jobs_of(tmp_path, script, script, script), []

    def ask():
        try:
            wait_until(lambda: all(job.log.exists() and job.log.read_text().endswith("ready\n") for job in jobs[:2]))
        finally:
            os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(error):
        run_jobs(jobs, 2, lambda job: None, lambda job, ended: ends.append((job.place, ended.code, ended.is_asked)))
    asking.join()
    assert sorted(ends) == [("job0", 75, True), ("job1", 75, True)]


def test_an_exception_ends_the_running_programs(tmp_path):
    pids = tmp_path / "pid"
    sleeps = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    jobs = jobs_of(tmp_path, "", sleeps)

    def end(job, ended):
        wait_until(lambda: pids.exists() and pids.read_text())
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        run_jobs(jobs, 2, lambda job: None, end)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


@pytest.mark.parametrize("what", ["a pipe", "a link", "a hard link", "a link to the logs"])
def test_a_log_that_is_a_link_or_a_pipe_is_one_sentence(what, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "job0.txt").write_text("mine")
    (job,) = jobs_of(tmp_path, "print('yours')")
    if what == "a link to the logs":
        job.log.parent.symlink_to(elsewhere)
    else:
        job.log.parent.mkdir()
        make = {"a pipe": lambda _, log: os.mkfifo(log), "a link": os.symlink, "a hard link": os.link}[what]
        make(elsewhere / "job0.txt", job.log)
    with pytest.raises(UserError, match="is a link, or not a file that can be written. Remove it"):
        run_jobs([job], 1, lambda job: None, lambda job, ended: None)
    assert (elsewhere / "job0.txt").read_text() == "mine"


def test_a_rank_s_error_is_preferred_to_later_lines():
    last = LastWords()
    for line in ("iteration 1", "host2 rank3| rank 3: no room", "host1 rank0| [library] aborted", ""):
        last.hear(line + "\n")
    assert last.words == "rank 3: no room"
