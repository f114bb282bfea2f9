"""Another user of this machine attacks a run of four ranks: its ports, files and processes."""

import contextlib
import encodings.idna  # noqa: F401 - sockets load it on first use, when the user may not read Python's files
import json
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from programs import TINY_TRAINING, free_port, script

from cos598d.world.connection import ProtocolError, connect, make_key
from cos598d.world.secret import find_secret

NOBODY = 65534
MOST_SILENT = 40


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def rubbish(marker):
    """What the attacker sends, by name. `marker` is a file that appears if a pickle is loaded."""
    bomb = pickle.dumps(Bomb(f"touch {marker}"))

    def torch_store(operation, key, value=b""):
        words = b"\0" + struct.pack("<I", 0x3C85F7CE) + bytes([operation]) + struct.pack("<Q", len(key)) + key
        return words + struct.pack("<Q", len(value)) + value

    objection = b"/cos598d/0/objection"
    return {
        "a browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        "a rank of old": struct.pack(">I", 1),
        "an objection in torch's store": torch_store(1, objection, b"\x1b[2Jstop"),
        "a key deleted in torch's store": torch_store(9, b"/cos598d/0/arrived/0"),
        "a pickle in torch's store": torch_store(1, b"/torch.rendezvous.state", bomb),
        "a pickle": bomb,
        "a message of a lost rank": b'{"lost": 1, "sentence": "\x1b[2Jlost"}\n',
        "a sequence number of gloo's": struct.pack("<q", random.randrange(64)),
        "bytes": os.urandom(2000),
        "a line without end": b"A" * (1 << 20),
        "nothing": b"",
    }


def fork_attack(folder: Path, files: list[Path]) -> int:
    """Start to attack as another user, in a process whose id is returned. Needs root.

    The attacker reads `folder`/targets.json again and again: [[ip, port, process], ...]. It writes attack.jsonl:
    {"sent": name} is what it sent, and {"got": what} is what it should not be able to do.
    """
    report = os.open(folder / "attack.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    process = os.fork()
    if process:
        os.close(report)
        return process
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ["HOME"] = os.environ["COS598D_CACHE"] = f"/tmp/nobody-{os.getpid()}"
        with os.fdopen(report, "w", buffering=1) as handle:
            try:
                _attack(folder, files, lambda **what: print(json.dumps(what), file=handle))
            except Exception as error:
                print(json.dumps({"died": repr(error)}), file=handle)
    finally:
        os._exit(0)


def _attack(folder, files, tell):
    words, silent = rubbish(folder / "executed"), []
    while True:
        try:
            targets = json.loads((folder / "targets.json").read_text())
        except (OSError, ValueError):
            targets = []
        for ip, port, process in targets:
            name = random.choice(list(words))
            with contextlib.suppress(OSError):
                line = socket.create_connection((ip, port), timeout=0.1)
                line.settimeout(0.1)
                silent.append(line)
                tell(sent=name)
                line.sendall(words[name])
            for key in (b"", find_secret(None, False), b"a guess of sixteen"):
                with contextlib.suppress(ProtocolError, OSError):
                    connect((ip, port), make_key(key, "meeting", ""), 1, 0.1, 1 << 20).close()
                    tell(got=f"into {ip}:{port} with {key!r}")
            with contextlib.suppress(OSError):
                os.kill(process, 0)
                tell(got=f"a signal to {process}")
            with contextlib.suppress(OSError):
                Path(f"/proc/{process}/environ").read_bytes()
                tell(got=f"the environment of {process}")
        while len(silent) > MOST_SILENT:
            silent.pop(0).close()
        for file in files:
            for opened, mode in ((file, "rb"), (file / "mine", "xb"), (file, "ab")):
                with contextlib.suppress(OSError), open(opened, mode):
                    tell(got=f"{opened} opened for {mode}")
            with contextlib.suppress(OSError):
                for inside in file.iterdir():
                    with contextlib.suppress(OSError), open(inside, "rb") as handle:
                        handle.read(1)
                        tell(got=f"{inside} read")
        time.sleep(0.02)


needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux, to be another user for a while"
)
# A minute and more: COS598D_ATTACK_STEPS=2000 python -m pytest tests/test_stranger.py
STEPS = int(os.environ.get("COS598D_ATTACK_STEPS", "20"))
SECONDS = 60 + 2 * STEPS


@pytest.fixture
def folder(monkeypatch):
    """A folder that every user can read, with a run's caches and records."""
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
    """Wait until all have ended. Return every address that they listened at, and write them to `targets` meanwhile."""
    processes = [psutil.Process(program.process.pid) for program in programs]
    seen, deadline = set(), time.monotonic() + SECONDS
    while any(program.process.poll() is None for program in programs):
        assert time.monotonic() < deadline, [program.text for program in programs]
        now = listening(processes)
        if targets and now:
            part = targets.with_suffix(".part")
            part.write_text(json.dumps(sorted(now)))
            part.rename(targets)
        seen |= now
        time.sleep(0.05)
    return seen


@pytest.mark.long
@needs_root
@pytest.mark.timeout(2 * SECONDS)
def test_another_user_cannot_change_read_or_run_anything(folder, start, start_ranks):
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
