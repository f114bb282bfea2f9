"""Worlds of real ranks for tests: a failing rank fails the test, with its traceback."""

from collections.abc import Callable, Iterable
from typing import Any

from programs import PATIENCE

from cos598d.comm.communicator import Communicator
from cos598d.tools.check.spawn import DIED, RAISED, RETURNED, RankEnd, run_world


class RankFailure(AssertionError):
    """One or more ranks failed; `texts[r]` is the traceback or output of rank r."""

    def __init__(self, texts: dict[int, str]):
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(texts.items())))
        self.texts = texts


def run_ranks(world_size: int, function: Callable, *arguments: Any, seconds: float = PATIENCE) -> list[Any]:
    """Call `function(comm, *arguments)` on `world_size` ranks at once; return their results (JSON), in order of rank.

    Raises RankFailure with the tracebacks of the ranks that failed; a rank that hangs is killed after `seconds`.
    """
    ends = run_world(world_size, function, *arguments, seconds=seconds, timeout=60)
    failures = {end.rank: _say(end, seconds) for end in ends if end.how != RETURNED}
    if failures:
        raise RankFailure(failures)
    return [end.value for end in ends]


def run_each(world_size: int, function: Callable, cases: Iterable, *arguments: Any) -> list[tuple[Any, ...]]:
    """Call `function(comm, case, *arguments)` for one case after the other, in one world.

    Returns for each case the ranks' results. Raises as `run_ranks` does.
    """
    return list(zip(*run_ranks(world_size, _each, function, list(cases), arguments), strict=True))


def _each(comm: Communicator, function: Callable, cases: list, arguments: tuple) -> list[Any]:
    return [function(comm, case, *arguments) for case in cases]


def _say(end: RankEnd, seconds: float) -> str:
    if end.how == RAISED:
        return end.traceback
    if end.how == DIED:
        return f"ended with exit code {end.exit_code} and no answer, having said:\n{end.output}"
    stack = "".join(f"\n  {frame.file}, line {frame.line}, in {frame.function}" for frame in end.frames)
    return f"still running after {seconds:g} s{stack}"
