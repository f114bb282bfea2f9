"""Worlds of real ranks for one function: fresh processes on this host that meet through a file, and always end."""

import contextlib
import faulthandler
import functools
import json
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cos598d.terminal.program import own_python_path
from cos598d.terminal.reading import open_plain
from cos598d.tools.check.supervisor import (
    END_SECONDS,
    LEAVE_SECONDS,
    MOST_FILE_BYTES,
    OUTPUT_BYTES,
    START_SECONDS,
    IsStuck,
    supervise,
)

# Forked from a server that has already loaded torch: a rank starts at once, and from a clean process.
_context = multiprocessing.get_context("forkserver")
# The first module that the server loads, and the variable with the process that started it, which it must not survive.
ENDS_WITH_STARTER, STARTER = "cos598d.tools.check.server", "COS598D_STARTER"
# A rank's first optimizer imports torch._dynamo, which takes a second.
PRELOADED = [ENDS_WITH_STARTER, "torch._dynamo", "cos598d.tools.check.claims", "cos598d.run"]
_context.set_forkserver_preload(PRELOADED)

RETURNED, RAISED, LATE, DIED = "returned", "raised", "did not end", "died"
# A rank that failed lets the others report their findings too, before they are told to stop.
SAY_SECONDS = 0.5
MOST_ANSWER_BYTES = 4 << 20
MOST_PATIENCE = 4.0
HANDED_IN, CALLS = "handed_in", "calls"
ENDINGS = ("where", "crash")  # what faulthandler writes when the time is up, and when the process crashes


@dataclass(frozen=True)
class StackFrame:
    """A line of code in a rank's call stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class RankEnd:
    """How one rank's call ended: `how` is returned, raised, did not end (in its time) or died (without an error).

    `frames` lead to the line where it raised or where it still was, the innermost last; `threads` holds those of a
    rank's other threads too. `output` is the end of what it printed. `handed_in` and `calls` are the contents of the
    files of these names (plus its rank) in its temporary folder, if it wrote them.
    """

    rank: int
    how: str
    value: Any = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    frames: tuple[StackFrame, ...] = ()
    threads: tuple[tuple[StackFrame, ...], ...] = field(default=(), repr=False)
    output: str = ""
    handed_in: bytes = field(default=b"", repr=False)
    calls: bytes = field(default=b"", repr=False)


def run_world(
    world_size: int,
    function: Callable,
    *arguments: Any,
    seconds: float,
    timeout: float = 20,
    is_stuck: IsStuck | None = None,
) -> list[RankEnd]:
    """Call `function(comm, *arguments)` on `world_size` ranks at once. Return how each ended, in order of rank.

    A call may take `seconds`. After that the world is ended, and each remaining rank reports where it was. The process
    group's collectives give up after `timeout` seconds. If `is_stuck` finds, from files in the ranks' folder, that they
    wait for each other forever, they are ended at once. The function's result must be JSON.
    """
    with tempfile.TemporaryDirectory(prefix="cos598d-world-", ignore_cleanup_errors=True) as name:
        run_rank = functools.partial(
            _run_rank,
            world_size=world_size,
            name=name,
            seconds=seconds,
            timeout=timeout,
            function=function,
            arguments=arguments,
        )
        mine, its = _context.Pipe()
        supervisor = _context.Process(
            target=supervise, args=(name, world_size, seconds, run_rank, its, util.get_temp_dir(), is_stuck)
        )
        try:
            start_server()
            supervisor.start()
            its.close()
            ends = _endings(mine, START_SECONDS + seconds + LEAVE_SECONDS + 2 * END_SECONDS)
        finally:
            mine.close()  # if it has not yet, it ends the ranks now
            if supervisor.pid is not None:
                supervisor.join(2 * END_SECONDS)
                if supervisor.exitcode is None:
                    supervisor.kill()
                    supervisor.join()
        return [_read(Path(name), rank, *(ends[rank] if ends else (None, ""))) for rank in range(world_size)]


def longer_than(seconds: float) -> float:
    """A timeout so long that a collective does not give up on a rank in an endless loop before the loop is found."""
    return seconds + 30


def patience() -> float:
    """The factor by which a busy machine is slower: correct code must not fail for lack of a core."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), MOST_PATIENCE)


def _endings(line: Connection, seconds: float) -> list[tuple[int | None, str]]:
    """The exit code and the end of the output of each rank, from the supervisor; [] if it is gone."""
    with contextlib.suppress(EOFError, OSError):
        if line.poll(seconds):
            return json.loads(line.recv_bytes())
    return []


def preload(modules: Sequence[str]) -> None:
    """Start the server, unless it runs, with these modules instead of PRELOADED."""
    _context.set_forkserver_preload([ENDS_WITH_STARTER, *modules])
    start_server()


def start_server() -> None:
    """Start the server, unless it runs. It finds this package in any working directory, installed or not."""
    # The kernel takes the end of a thread for that of the process: only the main one lasts.
    is_main = threading.current_thread() is threading.main_thread()
    ours = {
        STARTER: str(os.getpid()) if is_main else "",
        "PYTHONPATH": own_python_path(),
        # created as soon as torch._dynamo loads
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(util.get_temp_dir(), "inductor"),
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    resource_tracker.ensure_running()  # which unblocks signals
    # A Ctrl-C is for the grader, which ends what it has started. It must not reach those, from their first line on.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _read(folder: Path, rank: int, exit_code: int | None, output: str) -> RankEnd:
    """How a rank ended, from its files, which may contain anything."""
    handed_in, calls = (bytes_of(folder / f"{name}{rank}", MOST_FILE_BYTES) for name in (HANDED_IN, CALLS))
    died = RankEnd(rank, DIED, exit_code=exit_code, output=output, handed_in=handed_in, calls=calls)
    answer = bytes_of(folder / f"answer{rank}.json", MOST_ANSWER_BYTES)
    if answer:
        return _answered(answer, died) or replace(died, message="its answer cannot be read")
    where, crash = (bytes_of(folder / f"{name}{rank}", OUTPUT_BYTES).decode(errors="replace") for name in ENDINGS)
    threads = _threads(where or crash)
    # The main thread is the oldest, and comes last.
    frames = threads[-1] if threads else ()
    how = LATE if exit_code in (None, -signal.SIGALRM) else DIED
    return replace(died, how=how, frames=frames, threads=threads)


def _answered(data: bytes, end: RankEnd) -> RankEnd | None:
    """`end` with the rank's own report; None unless it has the right form."""
    try:
        answer = json.loads(data)
        kind, message, stack = (str(answer.get(name, "")) for name in ("type", "message", "traceback"))
        frames = tuple(
            StackFrame(str(file), int(line), str(function)) for file, line, function in answer.get("frames", ())
        )
        if (
            answer["how"] not in (RETURNED, RAISED)
            or answer["rank"] != end.rank
            or (answer["how"] == RAISED and not frames)
        ):
            return None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None
    end = replace(end, how=answer["how"], value=answer.get("value"), frames=frames, threads=(frames,))
    return replace(end, type=kind, message=message, traceback=stack)


def bytes_of(path: Path, most: int) -> bytes:
    """The end of a file's content; empty if there is no plain file."""
    try:
        with open_plain(path, "rb", follows=False) as content:
            content.seek(max(0, os.fstat(content.fileno()).st_size - most))
            return bytes(content.read(most))
    except OSError:
        return b""


def _threads(dump: str) -> tuple[tuple[StackFrame, ...], ...]:
    """The frames of each thread in faulthandler's output, the innermost last."""
    threads = []
    for part in re.split(r"^(?:Current thread|Thread) .*\n", dump, flags=re.MULTILINE)[1:]:
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', part, flags=re.MULTILINE)
        threads.append(tuple(StackFrame(file, int(line), function) for file, line, function in reversed(frames)))
    return tuple(threads)


def _run_rank(
    rank: int, world_size: int, name: str, seconds: float, timeout: float, function: Callable, arguments: tuple
) -> None:
    import torch
    from torch.distributed import FileStore

    from cos598d.comm.communicator import Communicator
    from cos598d.comm.process_group import close_group, open_group
    from cos598d.world.identity import Identity
    from cos598d.world.lifeline import Lifeline
    from cos598d.world.meeting import Meeting
    from cos598d.world.network import choose_interface

    folder = Path(name)
    tempfile.tempdir = name  # a killed rank's files there are removed with the world
    # The kernel ends this process if nothing else does: its parent may be gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS + seconds + 5)
    torch.set_num_threads(1)

    meeting = lifeline = None
    if world_size > 1:
        choose_interface("127.0.0.1")
        store = FileStore(str(folder / "store"), world_size)
        meeting = Meeting(Identity(rank, world_size), store, ["here"] * world_size, seconds=timeout)
        lifeline = Lifeline(meeting)
    with (folder / f"where{rank}").open("w") as where, (folder / f"crash{rank}").open("w") as crash:
        faulthandler.enable(crash)
        answer: dict[str, Any] = {"rank": rank, "how": RETURNED}
        try:
            open_group(meeting, "gloo")
            comm = Communicator(meeting, "gloo", torch.device("cpu"))
            faulthandler.dump_traceback_later(seconds, file=where)
            answer["value"] = function(comm, *arguments)
            text = json.dumps(answer)
        except BaseException as error:
            answer |= {"how": RAISED, "value": None} | _describe(error)
            text = json.dumps(answer)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    beside = folder / f"answer{rank}.part"
    beside.write_text(text)
    beside.rename(folder / f"answer{rank}.json")
    if answer["how"] == RAISED:
        if lifeline:
            _let_others_speak(folder, world_size)
            lifeline.fail(f"{answer['type']}: {answer['message']}")
        os._exit(1)
    if lifeline:
        lifeline.close()
    close_group()


def _describe(error: BaseException) -> dict[str, Any]:
    message = str(error)
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return {
        "type": type(error).__name__,
        "message": message,
        "traceback": "".join(traceback.format_exception(error)),
        "frames": frames,
    }


def _let_others_speak(folder: Path, world_size: int) -> None:
    deadline = time.monotonic() + SAY_SECONDS
    while time.monotonic() < deadline and len(list(folder.glob("answer*.json"))) < world_size:
        time.sleep(0.02)
