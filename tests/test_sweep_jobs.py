"""What a sweep finds in its folder and writes of its own runs; and how it starts, ends and logs their programs."""

import json
import os
import signal
import sys
import threading

import pytest
from programs import wait_until
from report_records import entry

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.errors import UserError
from cos598d.records.conventions import FAILED, FINISHED
from cos598d.terminal.signals import AskedToEnd
from cos598d.tools.runs.folders import SweepFolder
from cos598d.tools.runs.jobs import Ended, Job, LastWords, run_jobs
from cos598d.tools.runs.plan import combine, read_grid
from cos598d.tools.runs.runner import Runner

DIGITS = {"task_name": "digits"}
LAUNCH = "env {command}"
NETWORK = {"hosts": 2, "rate": "1gbit", "delay": "10ms", "offload": "on"}


def combinations(*grid):
    return combine(read_grid(grid), DIGITS, [42], "1gbit")


def sweep_of(path, launch=None):
    return SweepFolder(path, {"axes": {}, "seeds": [42], "flags": DIGITS, "rate": "1gbit", "launch": launch})


def record(path, one, **changes):
    """Write the record of a combination's run. `changes` are `entry`'s; `config` adds to what the sweep asks for."""
    ranks = one.setup.world_size
    config = {**one.values, "label": one.label, "world_size": ranks, **changes.pop("config", {})}
    environment = {"device": "cpu", "cores": 2, **changes.pop("environment", {})}
    memory = {"process_peak_bytes": [3e8] * ranks, "gpu_peak_bytes": [None] * ranks}
    summary = {"label": one.label, "memory": memory}
    entry(path, one.settings, one.seed, config=config, environment=environment, summary=summary, **changes)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """made(combinations, parallel, **changes): make them with programs that only write a record; return the folder."""

    def _made(found, parallel=1, keeps=False, code=0, **changes):
        def leave_records(jobs, at_a_time, begin, end):
            for job, one in [(job, one) for job in jobs for one in found if one.place == job.place]:
                begin(job)
                if code == 0:
                    record(tmp_path, one, **changes)
                end(job, Ended(code, "no room.", 5.0, False))

        monkeypatch.setattr("cos598d.tools.runs.runner.run_jobs", leave_records)
        folder = sweep_of(tmp_path)
        folder.write()
        Runner(folder, found, lambda one, begins: [], parallel, goes_on=True, keeps=keeps).run()
        return folder

    return _made


@pytest.mark.parametrize(
    ("setup", "environment", "launch", "words"),
    [
        ("1x2", {}, None, ""),
        ("2x1", {"ranks_on_host": 1}, LAUNCH, ""),
        ("2x1", {"ranks_on_host": 2}, LAUNCH, "its ranks_on_host is 2 and should be 1, for set-up 2x1"),
        ("1x2", {"ranks_on_host": 1}, LAUNCH, "its ranks_on_host is 1 and should be 2"),
        # SLURM's nodes go by their names, also where several are one machine.
        ("2x1", {"ranks_on_host": 2, "places": [{"node": "n1"}, {"node": "n2"}]}, LAUNCH, ""),
        ("2x1", {"ranks_on_host": 1, "places": [{"node": "n1"}] * 2}, LAUNCH, "its ranks_on_host is 2 and should be 1"),
        ("2x1", {"network": NETWORK}, None, ""),
        ("2x1", {"network": NETWORK | {"delay": "1ms"}}, None, "its delay is 1ms and should be 10ms"),
        ("2x1", {"network": NETWORK | {"rate": "none"}}, None, "its rate is none and should be 1gbit"),
        ("2x1", {"network": NETWORK | {"hosts": 4}}, None, "its hosts is 4 and should be 2"),
        ("1x2", {"network": NETWORK}, LAUNCH, "its hosts is 2 and should be 1"),
        # Where no axis asks for a rate, a template's own is as good as another.
        ("2x1", {"network": NETWORK | {"rate": "none"}}, LAUNCH, ""),
    ],
)
def test_a_record_of_other_hosts_or_links_is_not_the_run(setup, environment, launch, words, tmp_path):
    (one,) = combinations(f"setup={setup}", *(["delay=10ms"] if setup == "2x1" else []))
    folder = sweep_of(tmp_path, launch)
    record(tmp_path, one, environment=environment)
    folder.end(one, FINISHED)
    (found,) = folder.entries([one])
    assert found.outcome == (FAILED if words else FINISHED)
    assert words in found.said
    if words:
        with pytest.raises(UserError, match="It was not changed. Remove it, or give another --runs_dir"):
            folder.look(one)
    else:
        assert folder.look(one)[0]


def test_a_finished_run_of_another_command_is_not_overwritten(tmp_path):
    (one,) = combinations("batch=4")
    folder = sweep_of(tmp_path)
    record(tmp_path, one, config={"learning_rate": 1.0, "per_gpu_train_batch_size": 8})
    with pytest.raises(UserError, match="its per_gpu_train_batch_size is 8 and should be 4. It was not changed"):
        folder.look(one)
    # A run that it has begun is run again, even if its record is another's.
    folder.begin(one)
    found, why = folder.look(one)
    assert found is None
    assert "is another run" in why


def test_a_link_in_place_of_a_run_s_folder_is_refused(tmp_path):
    (one,) = combinations("batch=4")
    (tmp_path / "sweep").mkdir()
    folder = sweep_of(tmp_path / "sweep")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sweep" / one.label).symlink_to(tmp_path / "elsewhere")
    folder.begin(one)
    with pytest.raises(UserError, match="is a link, where a run needs a folder of its own. Remove it"):
        folder.look(one)


def test_a_later_call_knows_which_runs_were_made_in_parallel(made, capsys):
    found = combinations("batch=4,16")
    folder = made(found, parallel=3)
    assert [one.parallel for one in folder.entries(found)] == [2, 2]  # there are only two
    assert [one.parallel for one in made(found).entries(found)] == [2, 2]
    assert capsys.readouterr().out.count("finished before: ") == 2


def test_a_run_that_failed_in_parallel_stays_marked_after_a_retry(made):
    found = combinations("batch=4,16")
    folder = made(found, parallel=2, code=1)
    assert {one.outcome for one in folder.entries(found)} == {FAILED}
    assert [one.parallel for one in made(found).entries(found)] == [2, 2]


@pytest.mark.parametrize(("attempts", "seconds", "words"), [(1, 5.0, "5 s in all"), (2, None, "5 s since it went on")])
def test_total_seconds_are_of_runs_that_never_stopped(attempts, seconds, words, made, capsys):
    found = combinations("batch=4,16")
    folder = made(found, attempts=attempts)
    assert [folder.seconds(one) for one in found] == [seconds, seconds]
    text = capsys.readouterr().out
    assert words in text
    assert ("left" in text) == (attempts == 1)  # a part of a run does not estimate the others


@pytest.mark.parametrize("keeps", [False, True])
def test_checkpoints_of_finished_runs_are_removed_unless_kept(keeps, made, tmp_path):
    found = combinations("batch=4")
    made(found, keeps=keeps)
    place = tmp_path / found[0].label / "checkpoints" / "step-00000004"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    made(found, keeps=keeps)
    assert place.exists() == keeps
    assert json.loads((tmp_path / "sweep.json").read_text())["combinations"][found[0].label]["outcome"] == FINISHED


def test_checkpoints_in_another_folder_stay(made, tmp_path, tmp_path_factory):
    found = combinations("batch=4")
    made(found)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "step-00000004").mkdir()
    (elsewhere / "step-00000004" / "manifest.json").write_text("{}")
    (tmp_path / found[0].label / "checkpoints").symlink_to(elsewhere)
    made(found)
    assert (elsewhere / "step-00000004").exists()


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
