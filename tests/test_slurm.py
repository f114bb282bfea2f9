"""Trainings under a real SLURM of four nodes, and under a real mpirun: time limits, preemptions, lost ranks."""

import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from programs import ROOT, TINY_TRAINING, free_port, script
from report_records import read
from slurm import Job, Slurm, missing

from cos598d.records.unfinished import read_summary

pytestmark = pytest.mark.slurm
needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())
needs_mpirun = pytest.mark.skipif(
    not shutil.which("mpirun"), reason="not installed: mpirun (apt-get install openmpi-bin)"
)
OURS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
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
    """Give sbatch examples/train.sbatch: submit(flags of sbatch, flags of the training, variables) -> Job."""

    def _submit(words, flags, **variables):
        here = {"PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1"}  # the nodes' names resolve nowhere
        slurm.environ.update(OURS | here | variables)
        return Job(slurm, tmp_path, ROOT / "examples" / "train.sbatch", tmp_path / "out-%j.txt", words, flags)

    return _submit


def uninterrupted(start, tmp_path, ranks, *flags):
    words = ["-m", "cos598d", "train", *FLAGS, *flags, "--world_size", ranks, "--output_dir", "reference"]
    program = start("reference", words, {"PYTHONPATH": str(ROOT)})
    assert program.wait(120) == 0, program.text
    return read_summary(tmp_path / "reference").losses


@needs_slurm
def test_a_job_that_is_stopped_and_preempted_ends_with_the_same_losses(submit, slurm, start, tmp_path):
    losses = uninterrupted(start, tmp_path, 4, "--max_steps", 80)
    job = submit(["--nodes", 4], [*FLAGS, "--max_steps", 80])
    job.wait_for("iteration 5:")
    slurm.ask("scancel", "--signal=USR1", job.id)  # as before a time limit
    job.comes_back()
    job.wait_for("resumes after iteration (?s:.)*iteration \\d+:")
    slurm.ask("scontrol", "requeue", job.id)  # as by a preemption
    job.comes_back()
    job.wait_until("COMPLETED")
    assert job.text.count("resumes after iteration") == 2, job.text
    folder = tmp_path / "runs" / f"job-{job.id}"
    assert read_summary(folder).losses == losses
    environment = read(folder / "environment.json")
    job = environment["launcher"]["slurm"]
    assert (job["SLURM_JOB_NODELIST"], job["SLURM_RESTART_COUNT"]) == ("n[1-4]", "2")
    assert [place["node"] for place in environment["places"]] == ["n1", "n2", "n3", "n4"]


@pytest.mark.long
@needs_slurm
def test_a_time_limit_requeues_the_job_and_a_cancellation_ends_it(submit, slurm, tmp_path):
    # SLURM may signal up to a minute too early (sbatch's manual): of a limit of one minute, before the ranks listen.
    words = ["--nodes", 2, "--time", 2, "--signal", "USR1@30"]
    job = submit(words, [*FLAGS, "--max_steps", 1000000])
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
    job = submit(["--nodes", 2], [*FLAGS, "--max_steps", 60], MAX_RESTARTS="1")
    job.wait_for("iteration 9:")
    place = {"SLURM_JOB_ID": job.id, "SLURM_PROCID": "1"}
    killed = [process for process in psutil.process_iter(["name"]) if is_rank(process, place)]
    assert len(killed) == 1
    killed[0].send_signal(signal.SIGKILL)
    job.wait_until("COMPLETED")
    assert "rank 0: lost connection to rank 1" in job.text
    assert "the ranks ended with exit code 137: restart 1 of 1" in job.text
    assert read_summary(tmp_path / "runs" / f"job-{job.id}").losses == losses


def is_rank(process, place):
    try:
        return process.environ().items() >= place.items() and "train" in process.cmdline()[:4]
    except psutil.Error:
        return False


@needs_mpirun
def test_mpirun_starts_the_ranks_of_one_run(tmp_path):
    root = ["--allow-run-as-root"] if psutil.Process().uids().real == 0 else []
    words = ["mpirun", *root, "--oversubscribe", "-np", 2, "-x", "MASTER_PORT", sys.executable]
    words += [script("task3/run_glue.py"), *TINY_TRAINING, "--max_steps", 2, "--output_dir", "out"]
    environ = Slurm(tmp_path).environ | OURS | {"MASTER_PORT": str(free_port())}
    done = subprocess.run([*map(str, words)], cwd=tmp_path, env=environ, capture_output=True, timeout=120, check=True)
    assert b"iteration 2: loss" in done.stdout
    assert read_summary(tmp_path / "out").world_size == 2
    assert read(tmp_path / "out" / "environment.json")["launcher"]["name"] == "mpirun"
