"""Programs that tests start: on a free port, with their output in a file."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from random import SystemRandom

import psutil
from warm import WarmProcess

ROOT = Path(__file__).resolve().parents[1]
# Small enough that a step takes milliseconds; on one thread, since two that share a core wait for each other.
TINY = ("--model_name_or_path", "tiny", "--max_seq_length", "32", "--total_train_batch_size", "16", "--threads", "1")
TINY_TRAINING = (*TINY, "--do_train", "--no_save_model")
NOT_INHERITED = ("GLUE_DIR", "SQUAD_DIR", "IMAGE_DIR", "RANK", "WORLD_SIZE")
# How many seconds a test waits. It only ends a hang, so it is long enough for a busy machine.
PATIENCE = 180
# The kernel gives these only to programs that ask for one by number (Linux chooses from 32768 on).
_PORTS = range(20000, 28000)
# Sockets that mark the ports which this process got. The programs of older ones have ended.
_marks: deque[socket.socket] = deque(maxlen=50)
_started: list["Program"] = []


class Program:
    """One started program. Signals reach only it, and it ends with the test that started it.

    Scripts and our commands start in a process that has loaded torch (`warm`), except with `is_fresh`.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        words: Sequence[str],
        environ: dict[str, str] | None = None,
        is_fresh: bool = False,
    ):
        self.path = folder / f"{name}.txt"
        variables = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        variables |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)} | (environ or {})
        with self.path.open("w") as output:
            if not is_fresh and (words[0].endswith(".py") or words[:2] == ["-m", "cos598d"]):
                self.process = WarmProcess(words, folder, self.path, variables)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=variables
                )
        _started.append(self)

    @property
    def text(self) -> str:
        """Its output so far."""
        return self.path.read_text()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for its end and return the exit code. If it hangs, fail with its output and that of the others."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {seconds} s, with this output:\n{self.text}{self._others()}"
            ) from None

    def wait_for(self, words: str) -> None:
        """Wait until it has printed a match of the regular expression `words`."""
        deadline, has_ended = time.monotonic() + PATIENCE, False
        while not re.search(words, self.text):
            is_late = has_ended or time.monotonic() > deadline
            assert not is_late, f"{words!r} was not printed, but:\n{self.text}{self._others()}"
            has_ended = self.process.poll() is not None  # the words may be its last
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _others(self) -> str:
        """The output of other programs of its folder: if one rank hangs, another often shows why."""
        others = [other for other in _started if other is not self and other.path.parent == self.path.parent]
        return "".join(f"\n--- {one.path.stem}, exit code {one.process.poll()}:\n{one.text}" for one in others)


@contextlib.contextmanager
def programs_end() -> Iterator[None]:
    """Stop the programs that were started within it, however it ends."""
    before = len(_started)
    try:
        yield
    finally:
        for program in _started[before:]:
            program.stop()
        del _started[before:]


def assert_nothing_is_left() -> None:
    """Fail if a process that was started from here still runs, except the servers of multiprocessing."""
    servers = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    ours = [child for child in psutil.Process().children(recursive=True) if child.pid not in servers]
    _, left = psutil.wait_procs([child for child in ours if is_alive(child.pid)], timeout=60)
    found = []
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(f"{child.pid}: {' '.join(child.cmdline())}")
            child.kill()
    assert not found, f"these processes are left: {found}"


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until `holds()` is true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it is not true after {seconds} s"
        time.sleep(0.02)


def script(name: str) -> str:
    """The path of a task folder's script, e.g. "task2b/run_glue.py"."""
    return str(ROOT / name)


def free_port() -> int:
    """A free port that no other test takes before the program that will listen there.

    The kernel does not choose it: it could choose the same one for another program or connection while ours starts.
    This process holds the UDP port of that number, by which other tests see that the port is taken.
    """
    first = SystemRandom().randrange(len(_PORTS))
    for port in (*_PORTS[first:], *_PORTS[:first]):
        mark = socket.socket(type=socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        _marks.append(mark)
        return port
    raise OSError(f"none of the ports {_PORTS[0]} to {_PORTS[-1]} is free")


def children_of(pid: int) -> list[int]:
    """The ids of the processes that a process started, directly or not."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def worker_of_rank(pid: int, rank: int) -> int:
    """The id of the local worker of that rank among the processes that a process started."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == f"rank {rank}" or child.environ().get("RANK") == str(rank):  # ours, or a launcher's
                return child.pid
    raise AssertionError(f"no worker of rank {rank} under {pid}")


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
