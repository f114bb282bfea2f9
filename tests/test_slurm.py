"""Trainings under a real SLURM of four nodes, and under a real mpirun: time limits, preemptions, lost ranks."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from programs import ROOT, TINY_TRAINING, free_port, script
from slurm import Job, Slurm, missing

from cos598d.tools.report.load import load_run

pytestmark = pytest.mark.slurm
needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())
needs_mpirun = pytest.mark.skipif(
    not shutil.which("mpirun"), reason="not installed: mpirun (apt-get install openmpi-bin)"
)
FLAGS = [*TINY_TRAINING, "--sync", "bucketed", "--dropout", "model", "--save_steps", "7", "--log_every", "1"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    daemons = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        daemons.start()
        yield daemons
    finally:
        daemons.stop()


@pytest.fixture
def submit(slurm, tmp_path):
    """Give sbatch what our command prints: submit(words of sbatch, flags of the training) -> Job."""

    def _submit(words, flags):
        words = [*words, "--output", tmp_path / "out-%j.txt", "--", "train", *FLAGS, *flags]
        done = subprocess.run(
            [sys.executable, "-m", "cos598d", "sbatch", *map(str, words)],
            cwd=tmp_path,
            env=slurm.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (tmp_path / "job.sh").write_text(done.stdout)
        return Job(slurm, tmp_path / "job.sh", tmp_path / "out-%j.txt")

    return _submit


def uninterrupted(start, tmp_path, ranks, *flags):
    words = ["-m", "cos598d", "train", *FLAGS, *flags, "--world_size", ranks, "--output_dir", "reference"]
    program = start("reference", words, {"PYTHONPATH": str(ROOT)})
    assert program.wait(120) == 0, program.text
    return load_run(tmp_path / "reference")["losses"]


@needs_slurm
def test_a_job_asked_to_stop_and_one_preempted_go_on_to_the_same_losses(submit, slurm, start, tmp_path):
    """No name of a node resolves, so that rank 0 is found by the address of the node that called srun."""
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("n1", None)
    losses = uninterrupted(start, tmp_path, 4, "--max_steps", 80)
    job = submit(["--nodes", 4], ["--max_steps", 80])
    job.wait_for("iteration 5:")
    slurm.ask("scancel", "--signal=USR1", job.id)  # as before a time limit
    job.comes_back()
    job.wait_for("resumes after iteration (?s:.)*iteration \\d+:")
    slurm.ask("scontrol", "requeue", job.id)  # as by a preemption
    job.comes_back()
    job.wait_until("COMPLETED")
    assert job.text.count("resumes after iteration") == 2, job.text
    assert f"srun, job {job.id}.0: rank 0 on n1, rank 1 on n2, rank 2 on n3, rank 3 on n4" in job.text
    folder = tmp_path / "runs" / f"job-{job.id}"
    assert load_run(folder)["losses"] == losses
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["launcher"]["slurm"] | {"nodes": "n[1-4]", "requeues": "2"} == environment["launcher"]["slurm"]
    assert [place["node"] for place in environment["places"]] == ["n1", "n2", "n3", "n4"]


@pytest.mark.long
@needs_slurm
def test_a_time_limit_puts_the_job_back_and_who_cancels_it_is_obeyed(submit, slurm, tmp_path):
    # SLURM may signal up to a minute too early (sbatch's manual): of a limit of one minute, before the ranks listen.
    job = submit(["--nodes", 2, "--time", 2, "--signal_seconds", 30], ["--max_steps", 1000000])
    job.wait_for("iteration 5:")
    job.comes_back(150)
    assert job.text.count("DUE TO TIME LIMIT") == 0
    job.wait_for("resumes after iteration (?s:.)*iteration \\d+:")
    slurm.ask("scancel", job.id)
    job.wait_until("CANCELLED")
    assert job.field("Restarts") == "1"
    assert not (tmp_path / "runs" / f"job-{job.id}" / "summary.json").exists()


@needs_slurm
def test_a_rank_that_is_killed_is_started_again_within_its_job(submit, start, tmp_path):
    losses = uninterrupted(start, tmp_path, 2, "--max_steps", 60)
    job = submit(["--nodes", 2, "--max_restarts", 1], ["--max_steps", 60])
    job.wait_for("iteration 9:")
    place = {"SLURM_JOB_ID": job.id, "SLURM_PROCID": "1"}
    killed = [process for process in psutil.process_iter(["name"]) if is_rank(process, place)]
    assert len(killed) == 1
    killed[0].send_signal(signal.SIGKILL)
    job.wait_until("COMPLETED")
    assert "rank 0: lost connection to rank 1" in job.text
    assert "the ranks ended with exit code 137: restart 1 of 1" in job.text
    assert f"srun, job {job.id}.1: rank 0 on n1, rank 1 on n2" in job.text
    assert load_run(tmp_path / "runs" / f"job-{job.id}")["losses"] == losses


def is_rank(process, place):
    try:
        return process.environ().items() >= place.items() and "train" in process.cmdline()[:4]
    except psutil.Error:
        return False


@needs_mpirun
def test_mpirun_starts_the_ranks_of_one_run(tmp_path):
    root = ["--allow-run-as-root"] if psutil.Process().uids().real == 0 else []
    words = [
        "mpirun",
        *root,
        "--oversubscribe",
        "-np",
        "2",
        "-x",
        "MASTER_PORT",
        sys.executable,
        script("task3/run_glue.py"),
    ]
    done = subprocess.run(
        [*words, *TINY_TRAINING, "--max_steps", "2", "--output_dir", "out"],
        cwd=tmp_path,
        env=Slurm(tmp_path).environ | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^mpirun, run \S+: ranks 0-1 on \S+$", done.stdout, re.MULTILINE)
    assert load_run(tmp_path / "out")["world_size"] == 2
    assert json.loads((tmp_path / "out" / "environment.json").read_text())["launcher"]["name"] == "mpirun"


@needs_slurm
def test_a_sweep_s_array_job_makes_each_run_on_its_own_nodes_and_the_same_words_tabulate_it(slurm, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    variables = slurm.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def sweep(*words):
        grid = ["--grid", "setup=1x1,1x2,2x1", "--runs_dir", tmp_path / "sweep"]
        training = [*TINY_TRAINING[:4], "--max_train_examples", "32", "--max_eval_examples", "8", "--max_steps", "2"]
        command = [sys.executable, "-m", "cos598d", "sweep", *grid, *words, "--", "train", *training]
        done = subprocess.run(
            list(map(str, command)), cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "job.sh").write_text(sweep("--sbatch", "--output", tmp_path / "out-%a.txt"))
    job = Job(slurm, tmp_path / "job.sh", tmp_path / "out-2.txt")
    deadline = time.monotonic() + 200
    while slurm.ask("squeue", "--noheader", "--jobs", job.id, check=False).strip():
        assert time.monotonic() < deadline, [path.read_text() for path in tmp_path.glob("out-*.txt")]
        time.sleep(0.2)
    places = {}
    for setup in ("1x1", "1x2", "2x1"):
        environment = json.loads((tmp_path / "sweep" / f"setup{setup}-seed42" / "environment.json").read_text())
        places[setup] = len({place["node"] for place in environment["places"]}), len(environment["places"])
    assert places == {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 2)}, job.text
    assert sweep().count("finished before: acc ") == 3
