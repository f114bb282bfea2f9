"""Worlds of real ranks for tests: a failing rank fails the test, with its traceback."""

from collections.abc import Callable
from typing import Any

from programs import PATIENCE

from cos598d.tools.check.spawn import DIED, RAISED, RETURNED, RankEnd, run_world


class RankFailure(AssertionError):
    """One or more ranks failed; `texts[r]` is what rank r said."""

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


def _say(end: RankEnd, seconds: float) -> str:
    if end.how == RAISED:
        return end.traceback
    if end.how == DIED:
        return f"ended with exit code {end.exit_code} and no answer, having said:\n{end.output}"
    stack = "".join(f"\n  {frame.file}, line {frame.line}, in {frame.function}" for frame in end.frames)
    return f"still running after {seconds:g} s{stack}"
