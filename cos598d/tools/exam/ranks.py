"""Run a function of ours, with a file that is not ours, on real ranks of this host; and judge in the parent.

Each rank is a fork of a server that has torch loaded. Through one pipe it tells its parent each call before it makes
it, and at its end its result. The file never runs in the parent.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from cos598d.tools.exam.notes import NotAsAgreed, Trace
from cos598d.tools.exam.on_rank import Task, be_rank
from cos598d.tools.exam.server import start_server
from cos598d.tools.exam.source import line_of, rebound
from cos598d.tools.exam.standstill import standstill, unlike
from cos598d.tools.exam.wire import unpack

START_SECONDS, SAY_SECONDS = 60.0, 0.7
QUIET_SECONDS = 2.0  # for which all ranks wait in calls that, therefore, never end
_context = multiprocessing.get_context("forkserver")
VALUE, RAISED, LATE, DIED, STUCK = "value", "raised", "late", "died", "stuck"
End = tuple[str, Any]


class Wrong(AssertionError):
    """A mistake in the file, in one sentence, with its line (0: unknown). `detail` has the numbers."""

    def __init__(self, words: str, line: int = 0, detail: str = ""):
        super().__init__(words)
        self.words, self.line, self.detail = words, line, detail


@dataclass
class World:
    """What the ranks of one run did: `values` are their results, `traces` their calls, in order of rank."""

    file: Path
    traces: list[Trace]
    values: list[Any] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.traces)

    def require(self, holds: bool, words: str, rank: int = 0, about: str = "") -> None:
        """Raise Wrong with these words unless it `holds`; `rank` is the one whose last call names the line."""
        if not holds:
            self.fail(words, rank, about=about)

    def agree(self) -> None:
        """Raise Wrong for calls that the ranks did not make alike."""
        odd = unlike(self.traces, self.file.name, is_over=True)
        if odd:
            raise Wrong(*odd)

    def fail(self, words: str, rank: int = 0, detail: str = "", about: str = "") -> NoReturn:
        """Raise Wrong: for calls that the ranks did not make alike, if there are any; else with these words.

        about: the function or class of the file whose line is named, in place of the rank's last call.
        """
        odd = unlike(self.traces, self.file.name, is_over=bool(self.values))
        if odd:
            raise Wrong(*odd)
        lines = [call.line for call in self.traces[rank].calls if call.line]
        again = rebound(self.file) if "gradient" in words else None
        if again:
            line, name = again
            words = f"{words.partition(':')[0]}: line {line} computes a new tensor and calls it {name}, which does not "
            words += f"change the one that was given; change that in place ({name} /= ...)"
        raise Wrong(words, line_of(self.file, about) if about or not lines else lines[-1], detail)


def patience() -> float:
    """The factor by which a busy machine is slower, 1 to 4."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 4.0)


def run(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    file: Path,
    only: Sequence[str] = (),
    seconds: float = 8.0,
    loads: bool = True,
) -> World:
    """Call `function(comm, module, *arguments)` on `size` ranks, where `module` is the file; return what came out.

    function: of a module of ours; it returns numbers, texts, lists, dictionaries and tensors. only: the calls that the
    file may make; () for any. seconds: that a rank may take on an idle machine. loads: whether `module` is
    loaded; else it is None, and the file only names lines. Raises Wrong if a rank fails, does not
    end, makes calls that it may not make, or leaves one that nobody waits for.
    """
    file, seconds = file.resolve(), seconds * patience()
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[ForkServerProcess] = []
        pipes: dict[Connection, int] = {}
        traces = [Trace() for _ in range(size)]
        ends: dict[int, End] = {}
        try:
            for rank in range(size):
                mine, its = _context.Pipe()
                task = Task(rank, size, folder, file, seconds, loads)
                ranks.append(_context.Process(target=be_rank, args=(task, its, function, arguments)))
                ranks[-1].start()
                its.close()
                pipes[mine] = rank
            ends = _listen(pipes, traces, START_SECONDS + 2 * seconds)
        finally:
            for each in ranks:
                _end(each)
            for pipe in pipes:
                pipe.close()
    world = World(file, traces)
    _judge_ends(world, ends, [each.exitcode for each in ranks])
    world.values = [ends[rank][1] for rank in range(size)]
    _judge_calls(world, only)
    return world


def _end(process: ForkServerProcess) -> None:
    """End a rank and what it has started."""
    if process.pid is None:  # a signal came before it was started
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _listen(pipes: dict[Connection, int], traces: list[Trace], seconds: float) -> dict[int, End]:
    """Hear all ranks until each has said how it ended, one has failed, or all wait for each other."""
    open_pipes = dict(pipes)
    ends: dict[int, End] = {}
    heard = time.monotonic()
    deadline = heard + seconds
    while len(ends) < len(traces) and time.monotonic() < deadline:
        ready = wait([*open_pipes], timeout=0.05)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank, heard = open_pipes[pipe], time.monotonic()
            end = _heard(pipe, traces[rank])
            if end is None:
                continue
            if end[0] == DIED:
                del open_pipes[pipe]
            if rank not in ends:
                ends[rank] = end
                if end[0] != VALUE:
                    deadline = min(deadline, heard + SAY_SECONDS)
        if ready or not all(rank in ends or trace.stuck_in for rank, trace in enumerate(traces)):
            continue
        if unlike(traces, "", is_over=False) or time.monotonic() > heard + QUIET_SECONDS * patience():
            break
    return ends


def _heard(pipe: Connection, trace: Trace) -> End | None:
    """Take one message of a rank: a note about a call, or how the rank ended."""
    try:
        data = pipe.recv_bytes()
        if data[:1] == b"V":
            return VALUE, unpack(data[1:])
        kind, *rest = json.loads(data[1:])
        if kind in (RAISED, LATE):
            return kind, rest
        trace.note(kind, rest)
    except (EOFError, OSError):
        return DIED, None
    except Exception:  # the file may have written into the pipe
        return RAISED, ["", "what the rank handed in cannot be read", 0, ""]
    return None


def _judge_ends(world: World, ends: dict[int, End], exit_codes: Sequence[int | None]) -> None:
    """Raise Wrong unless every rank has handed in its result."""
    how = [ends.get(rank, (STUCK, None)) for rank in range(world.size)]
    bad = [rank for rank, (kind, _) in enumerate(how) if kind != VALUE]
    if not bad:
        return
    odd = unlike(world.traces, world.file.name, is_over=False)
    if not odd and all(how[rank][0] == STUCK for rank in bad):
        odd = standstill(world.traces, world.file.name)
    if odd:
        raise Wrong(*odd)
    # A rank that died makes the others' calls fail: it comes first. One that waits for others does not loop.
    order = (DIED, LATE, RAISED, STUCK)
    rank = min(bad, key=lambda each: (order.index(how[each][0]), world.traces[each].stuck_in is not None))
    kind, rest = how[rank]
    if kind == RAISED:
        name, message, line, code = rest
        if name == NotAsAgreed.__name__:
            raise Wrong(message, line or line_of(world.file))
        at = f", at `{code}`" if code else ""
        said = f"{name}: {message}" if name else message
        raise Wrong(f"rank {rank} raised an exception{at}: {said}", line or line_of(world.file))
    if kind == LATE:
        line, code = rest
        raise Wrong(f"rank {rank} did not end{f', at `{code}`' if code else ''}", line or line_of(world.file))
    last = next(iter(reversed(world.traces[rank].calls)), None)
    after = f" after {last.words(world.file.name)}" if last else ""
    line = last.line if last else line_of(world.file)
    raise Wrong(f"rank {rank} ended early{after} (exit code {exit_codes[rank]})", line)


def _judge_calls(world: World, only: Sequence[str]) -> None:
    """Raise Wrong for a call that the file may not make, whose tensor changed too early, or that nobody waited for."""
    calls = [call for trace in world.traces for call in trace.calls]
    for call in calls:
        if only and call.op not in only:
            wanted = "messages" if "send" in only else " and ".join(f"comm.{op}" for op in only)
            raise Wrong(f"comm.{call.op} is called: the sum has to be made of {wanted}", call.line)
        if call.changed:
            what = f"the tensor of {call.words(world.file.name)} was changed before the call had ended"
            raise Wrong(f"{what}: wait for the call first, then divide", call.line)
    left = next((call for call in calls if not (call.is_over or call.raised)), None)
    if left:
        told = f"{left.words(world.file.name)} is never waited for: keep what it returns, and call its wait()"
        raise Wrong(told, left.line)
