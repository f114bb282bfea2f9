"""Worlds of real ranks for one function: fresh processes of this host that meet through a file, and always end."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

# Forked from a server that has torch loaded already: a rank starts in a blink, and from a clean process.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["cos598d.conformance", "cos598d.run"])

RETURNED, RAISED, LATE, DIED = "returned", "raised", "did not end", "died"
# How long ranks may take to start and meet, which is no part of the function's time.
START_SECONDS = 30.0
# A rank that failed lets the others say what they found too, before they are told to stop.
SAY_SECONDS = 0.5
# When one rank's time is up, the others' is within this; also how long a rank may take to leave.
LEAVE_SECONDS = 1.0
OUTPUT_CHARACTERS = 20_000


@dataclass(frozen=True)
class Place:
    """A line of code that a rank was at."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class RankEnd:
    """How one rank's call ended: `how` is returned, raised, did not end (in its time) or died (without a word).

    `places` lead to the line where it raised or where it still was, the innermost last; `threads` holds those of a
    rank's other threads too. `output` is the end of what it printed.
    """

    rank: int
    how: str
    value: Any = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    places: tuple[Place, ...] = ()
    threads: tuple[tuple[Place, ...], ...] = field(default=(), repr=False)
    output: str = ""


def run_world(
    world_size: int, function: Callable, *arguments: Any, seconds: float, timeout: float = 20
) -> list[RankEnd]:
    """Call `function(comm, *arguments)` on `world_size` ranks at once; say of each how it ended, in order of rank.

    A call may take `seconds`; after that the world is ended, and each rank that is left says where it was. The process
    group's collectives give up after `timeout` seconds. What the function returns must be JSON.
    """
    with tempfile.TemporaryDirectory(prefix="cos598d-world-") as name:
        folder = Path(name)
        ranks = [
            _context.Process(target=_be_rank, args=(rank, world_size, name, seconds, timeout, function, arguments))
            for rank in range(world_size)
        ]
        try:
            _start_server()
            for process in ranks:
                process.start()
            _wait(ranks, folder, time.monotonic() + START_SECONDS + seconds)
        finally:
            ended = [process.exitcode for process in ranks]
            for process in ranks:
                _kill(process)
        return [_read(folder, rank, exit_code) for rank, exit_code in enumerate(ended)]


def _start_server() -> None:
    """Start the server, unless it runs; it finds this package whatever the working directory, installed or not."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parents[1]), *([before] if before else [])))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _wait(ranks: Sequence[Any], folder: Path, deadline: float) -> None:
    """Return when all ranks have ended, or none of those that are left will by itself."""
    while time.monotonic() < deadline:
        left = [process.sentinel for process in ranks if process.exitcode is None]
        if not left:
            return
        connection.wait(left, timeout=0.05)
        is_late = any(path.stat().st_size for path in folder.glob("where*"))
        all_said = all((folder / f"answer{rank}.json").exists() for rank in range(len(ranks)))
        if is_late or all_said:
            deadline = min(deadline, time.monotonic() + LEAVE_SECONDS * (1 if is_late else 5))


def _kill(process: Any) -> None:
    """End a rank and what it has started; each rank leads a group of its own."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.exitcode is None:
        process.kill()
    process.join()


def _read(folder: Path, rank: int, exit_code: int | None) -> RankEnd:
    with contextlib.suppress(FileNotFoundError):
        return _with_places(json.loads((folder / f"answer{rank}.json").read_text()))
    output, where, crash = (_text(folder / f"{name}{rank}") for name in ("output", "where", "crash"))
    threads = _threads(where or crash)
    # The main thread is the oldest, and told last.
    places = threads[-1] if threads else ()
    how = LATE if exit_code in (None, -signal.SIGALRM) else DIED
    return RankEnd(rank, how, exit_code=exit_code, places=places, threads=threads, output=output)


def _with_places(answer: dict[str, Any]) -> RankEnd:
    places = tuple(Place(*place) for place in answer.pop("places", ()))
    return RankEnd(**answer, places=places, threads=(places,))


def _text(path: Path) -> str:
    return path.read_text(errors="replace")[-OUTPUT_CHARACTERS:] if path.exists() else ""


def _threads(dump: str) -> tuple[tuple[Place, ...], ...]:
    """The places of each thread in what faulthandler wrote, the innermost last."""
    threads = []
    for part in re.split(r"^(?:Current thread|Thread) .*\n", dump, flags=re.MULTILINE)[1:]:
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', part, flags=re.MULTILINE)
        threads.append(tuple(Place(file, int(line), function) for file, line, function in reversed(frames)))
    return tuple(threads)


def _be_rank(
    rank: int, world_size: int, name: str, seconds: float, timeout: float, function: Callable, arguments: tuple
) -> None:
    import torch
    from torch.distributed import FileStore

    from cos598d import comm as communication
    from cos598d.interfaces import choose_interface
    from cos598d.launch import Identity
    from cos598d.lifeline import Lifeline
    from cos598d.rendezvous import Meeting

    os.setpgrp()
    folder = Path(name)
    tempfile.tempdir = name  # what a killed rank leaves there goes with the world
    # The kernel ends this process when nobody else does: its starter may be gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS + seconds + 5)
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(output, descriptor)
        stream.reconfigure(line_buffering=True)
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
            communication.open_group(meeting, "gloo")
            comm = communication.Communicator(meeting, "gloo", torch.device("cpu"))
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
    communication.close_group()


def _describe(error: BaseException) -> dict[str, Any]:
    message = str(error)
    places = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return {
        "type": type(error).__name__,
        "message": message,
        "traceback": "".join(traceback.format_exception(error)),
        "places": places,
    }


def _let_others_speak(folder: Path, world_size: int) -> None:
    deadline = time.monotonic() + SAY_SECONDS
    while time.monotonic() < deadline and len(list(folder.glob("answer*.json"))) < world_size:
        time.sleep(0.02)
