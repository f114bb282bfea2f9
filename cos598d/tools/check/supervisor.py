"""A world's supervisor: the process between the grader and the ranks, which starts them and outlives them.

It runs none of their code. It ends whatever a rank has started, also in a session of its own, since orphans become its
children (Linux). If the grader is gone, it ends everything and removes the world's folder.
"""

import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

# How long ranks may take to start and meet, in addition to the function's time.
START_SECONDS = 30.0
# When one rank's time is up, the others' follows within this; also how long a rank may take to end.
LEAVE_SECONDS = 1.0
POLL_SECONDS = 0.05
END_SECONDS = 10.0
OUTPUT_BYTES = 20_000  # the end of a rank's output that is kept
MOST_FILE_BYTES = 256 << 20
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # prctl(2)

IsStuck = Callable[[Path, int], bool]  # from a world's folder and size: whether its ranks wait for each other forever


def supervise(
    name: str,
    world_size: int,
    seconds: float,
    run_rank: Callable[[int], None],
    line: Connection,
    grader_folder: str,
    is_stuck: IsStuck | None = None,
) -> None:
    """Run `run_rank(rank)` in a process for each rank until all have ended, or the rest will not end by themselves.

    Then send the grader, through `line`, the exit code of each that ended and the end of each one's output. `name` is
    the world's folder. `is_stuck`, if given, detects ranks that wait for each other. If `line` closes before, the
    grader has given up, or is gone and cannot remove its temporary folder, `grader_folder`.
    """
    os.setpgrp()
    prctl(SET_CHILD_SUBREAPER, 1)
    tree = ProcessTree()
    ranks: dict[int, int] = {}
    outputs: dict[int, int] = {}
    for rank in range(world_size):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reads)
            line.close()
            _start(run_rank, rank, writes)
        os.close(writes)
        os.set_blocking(reads, False)
        ranks[pid], outputs[reads] = rank, rank
    exit_codes: dict[int, int] = {}
    said = dict.fromkeys(range(world_size), b"")
    is_wanted = _watch(Path(name), ranks, outputs, exit_codes, said, START_SECONDS + seconds, line, is_stuck)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    tree.end()
    for output in list(outputs):
        _drain(output, outputs, said)
    if not is_wanted:
        shutil.rmtree(name, ignore_errors=True)
        grader = multiprocessing.parent_process()
        if grader and wait([grader.sentinel], timeout=0.2):
            shutil.rmtree(grader_folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        answer = [[exit_codes.get(rank), said[rank].decode(errors="replace")] for rank in range(world_size)]
        line.send_bytes(json.dumps(answer).encode())


def _watch(
    folder: Path,
    ranks: dict[int, int],
    outputs: dict[int, int],
    exit_codes: dict[int, int],
    said: dict[int, bytes],
    seconds: float,
    line: Connection,
    is_stuck: IsStuck | None,
) -> bool:
    """Wait for the ranks to end. Return whether the grader is still waiting too."""
    grader = multiprocessing.parent_process()
    ends = [line.fileno(), *([grader.sentinel] if grader else [])]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ready, _, _ = select.select([*ends, *outputs], [], [], POLL_SECONDS)
        if set(ready) & set(ends):
            return False
        for output in ready:
            _drain(output, outputs, said)
        _reap(ranks, exit_codes)
        if len(exit_codes) == len(ranks) or (is_stuck and is_stuck(folder, len(ranks))):
            break
        is_late = any(_size(folder / f"where{rank}") for rank in ranks.values())
        all_said = all((folder / f"answer{rank}.json").exists() for rank in ranks.values())
        if is_late or all_said:
            deadline = min(deadline, time.monotonic() + LEAVE_SECONDS * (1 if is_late else 5))
    _reap(ranks, exit_codes)
    return True


def _start(run_rank: Callable[[int], None], rank: int, output: int) -> None:
    """In the rank's own process: run it, and end."""
    status = 1
    try:
        os.setpgrp()
        supervisor = os.getppid()
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != supervisor:  # it ended before the kernel could be asked
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Otherwise libraries' locks would be files, which somebody must remove when this process is ended.
        multiprocessing.set_start_method("fork", force=True)
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(output, descriptor)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        os.close(output)
        run_rank(rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0


def _drain(output: int, outputs: dict[int, int], said: dict[int, bytes]) -> None:
    """Read the available output, and keep its end."""
    with contextlib.suppress(BlockingIOError):
        data = os.read(output, 1 << 16)
        if data:
            said[outputs[output]] = (said[outputs[output]] + data)[-OUTPUT_BYTES:]
        else:
            del outputs[output]
            os.close(output)


def _reap(ranks: dict[int, int], exit_codes: dict[int, int]) -> None:
    """Collect children that have ended: ranks, and orphans that ranks have left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in ranks:
                exit_codes[ranks[pid]] = os.waitstatus_to_exitcode(status)


class ProcessTree:
    """The processes below this one that are started from now on, by one submission or world after the other.

    Orphans among them become this process's children if it has asked for that (`prctl`). Processes are identified by
    number and birth. `end` tries again what an earlier `end` could not end.
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._left: set[psutil.Process] = set()
        self.exit_codes: dict[int, int] = {}  # of this process's own children that `reap` has collected

    def begin(self) -> None:
        """The next submission begins: end what is left of earlier ones, and count none of it as this one's."""
        self.end()
        self._left = set(self.processes())
        self.exit_codes.clear()

    def processes(self) -> list[psutil.Process]:
        """Those that exist now, of all submissions."""
        with contextlib.suppress(psutil.Error):
            return [each for each in psutil.Process().children(recursive=True) if each not in self._before]
        return []

    def own(self, processes: list[psutil.Process]) -> list[psutil.Process]:
        """Those among them that the current submission started."""
        return [each for each in processes if each not in self._left]

    def end(self) -> bool:
        """End them all; return whether none is left."""
        deadline = time.monotonic() + END_SECONDS
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.reap(left)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def reap(self, processes: list[psutil.Process]) -> None:
        """Collect those that are this process's children and have ended."""
        for process in processes:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    self.exit_codes[pid] = os.waitstatus_to_exitcode(status)


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere only a rank's process group can be ended."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
