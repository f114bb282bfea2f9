"""A second user of this machine against a run of four ranks, and every address that a run listens at."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from programs import TINY_TRAINING, free_port, script
from stranger import fork_attack

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux, to be another user for a while"
)
# A minute and more: COS598D_ATTACK_STEPS=2000 python -m pytest tests/test_stranger.py
STEPS = int(os.environ.get("COS598D_ATTACK_STEPS", "20"))
SECONDS = 60 + 2 * STEPS


@pytest.fixture
def folder(monkeypatch):
    """A folder that every user can look into, as a run's caches and records may stand in one."""
    path = Path(tempfile.mkdtemp(prefix="cos598d-test-"))
    path.chmod(0o755)
    monkeypatch.setenv("COS598D_CACHE", str(path / "cache"))
    yield path
    shutil.rmtree(path)


def listening(processes):
    """[(address, port, process), ...] of what `processes` and their children listen at."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    places = [c.laddr for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                    found.update((place.ip, place.port, each.pid) for place in places)
    return found


def losses(summary):
    return json.loads(summary.read_text())["losses"]


def watch(programs, targets=None):
    """Wait until all have ended; return every place that they listened at. `targets` is told of them meanwhile."""
    processes = [psutil.Process(program.process.pid) for program in programs]
    seen, deadline = set(), time.monotonic() + SECONDS
    while any(program.process.poll() is None for program in programs):
        assert time.monotonic() < deadline, [program.text for program in programs]
        now = listening(processes)
        if targets and now:
            beside = targets.with_suffix(".part")
            beside.write_text(json.dumps(sorted(now)))
            beside.rename(targets)
        seen |= now
        time.sleep(0.05)
    return seen


@pytest.mark.long
@needs_root
@pytest.mark.timeout(2 * SECONDS)
def test_another_user_changes_nothing_reads_nothing_and_runs_nothing(folder, start, start_ranks):
    words = [*TINY_TRAINING, "--max_steps", STEPS, "--timeout", 60]
    quiet = start("quiet", [script("task2b/run_glue.py"), *words, "--world_size", 4, "--output_dir", folder / "quiet"])
    places = watch([quiet])
    assert quiet.wait() == 0, quiet.text
    assert {ip for ip, _, _ in places} == {"127.0.0.1"}
    assert quiet.process.pid not in {process for _, _, process in places}  # the starter listens nowhere

    port = free_port()
    (folder / "targets.json").write_text(json.dumps([["127.0.0.1", port, quiet.process.pid]]))
    attack = fork_attack(folder, [folder / "cache", folder / "cache" / f"secret-{os.geteuid()}", quiet.path.parent])
    try:
        ranks = start_ranks("task2b/run_glue.py", 4, [*words, "--output_dir", folder / "attacked"], port=port)
        places = watch(ranks, folder / "targets.json")
    finally:
        os.kill(attack, signal.SIGKILL)
        os.waitpid(attack, 0)
    for rank in ranks:
        assert rank.wait() == 0, rank.text
        assert "\x1b" not in rank.text
    assert {ip for ip, _, _ in places} == {"127.0.0.1"}
    assert losses(folder / "attacked" / "summary.json") == losses(folder / "quiet" / "summary.json")
    told = [json.loads(line) for line in (folder / "attack.jsonl").read_text().splitlines()]
    assert not [each for each in told if "died" in each], told[-1]
    assert len([each for each in told if "sent" in each]) > 10
    assert not [each["got"] for each in told if "got" in each]
    assert not (folder / "executed").exists()
