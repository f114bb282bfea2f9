"""The graders' commands as a test runs them: whole programs on a free port, their words collected."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from warm import WarmProcess

ROOT = Path(__file__).resolve().parents[1]
# Small enough that a step takes milliseconds.
TINY = ("--model_name_or_path", "tiny", "--max_seq_length", "32", "--total_train_batch_size", "16")
TINY_TRAINING = (*TINY, "--do_train", "--no_save_model")
NOT_INHERITED = ("GLUE_DIR", "SQUAD_DIR", "RANK", "WORLD_SIZE")


class Program:
    """One started program. Signals sent to it hit it alone, and it ends with the test that started it.

    Where it may, it begins in a process that has torch already (`warm`); `is_fresh` says that it may not.
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
            if not is_fresh and _is_ours(words) and not _is_for_python(environ or {}):
                self.process = WarmProcess(words, folder, self.path, variables)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=variables
                )

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.path.read_text()

    def wait(self, seconds: float = 60) -> int:
        """Wait for its end and return the exit code. Fails when it hangs."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s, having said:\n{self.text}") from None

    def wait_for(self, words: str, seconds: float = 60) -> None:
        """Wait until it has printed a match of the regular expression `words`."""
        deadline = time.monotonic() + seconds
        while not re.search(words, self.text):
            assert time.monotonic() < deadline, f"{words!r} was not said in {seconds} s, but:\n{self.text}"
            assert self.process.poll() is None, f"{words!r} was not said before the end, but:\n{self.text}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _is_ours(words: Sequence[str]) -> bool:
    """Whether it is `-m cos598d`, a lesson's script or an example."""
    return list(words[:2]) == ["-m", "cos598d"] or Path(words[0]).parent in (*ROOT.glob("task*"), ROOT / "examples")


def _is_for_python(environ: dict[str, str]) -> bool:
    """Whether some of these variables count where Python or torch begins."""
    others = environ.keys() - ({"PYTHONPATH"} if environ.get("PYTHONPATH") == str(ROOT) else set())
    return any(name.startswith(("PYTHON", "LD_", "OMP_", "TORCH")) for name in others)


def script(name: str) -> str:
    """The path of a task folder's script, e.g. "task2b/run_glue.py"."""
    return str(ROOT / name)


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children_of(pid: int) -> list[int]:
    """The ids of the processes that a process has started, and of those that these have."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def worker_of_rank(pid: int, rank: int) -> int:
    """The id of the local worker of that rank among what a process has started."""
    for child in psutil.Process(pid).children(recursive=True):
        if child.name() == f"rank {rank}" or child.environ().get("RANK") == str(rank):  # a fork says it by its name
            return child.pid
    raise AssertionError(f"no worker of rank {rank} under {pid}")


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
