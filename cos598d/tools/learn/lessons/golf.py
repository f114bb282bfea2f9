"""How `--golf` measures a lesson's file: some steps that are judged like a check, their bytes and their seconds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import BadEvidence
from cos598d.tools.learn.checking import Check, Golf, OnLesson
from cos598d.tools.learn.lessons.common import NEAR, count_of, near, traffic

STEPS = 8  # of which the first is judged, and not timed
NAME = "golf"
Results = Mapping[str, torch.Tensor]
# For the number of a step: what is timed, and what is handed in of it.
Turn = Callable[[int], tuple[Callable[[], Any], Callable[[], Results]]]


@dataclass(frozen=True)
class Stroke:
    """One world's result: the bytes of the rank that sends most, in its largest step; the seconds of the slowest rank,
    the median over the steps; and for each rank what the host did meanwhile, as a bench has it."""

    bytes: int
    seconds: float
    host: Sequence[Mapping[str, float]]


def golf_of(
    what: str,
    ranks: int,
    least: int,
    start: Callable[[OnLesson], Turn],
    right: Callable[[int, int], Sequence[Results]],
    only: tuple[str, ...] = (),
    tolerance: float = NEAR,
) -> Golf:
    """A lesson's golf. `start` is called on each rank before the first step. `right(nonce, ranks)` are the results that
    every rank should hand in, step by step; `only` is a check's."""

    def observe(on: OnLesson) -> None:
        """The steps that are measured have the right results."""
        from cos598d.measure.monitor import HostGauges

        turn, steps = start(on), []
        gauges, began = HostGauges(torch.device("cpu"), lambda _: None), perf_counter()
        gauges.start()
        for number in range(STEPS):
            run, result = turn(number)
            on.comm.exchange(number)  # so that all begin together
            ledger, since = on.fresh_ledger(), perf_counter()
            run()
            steps.append({"seconds": perf_counter() - since, **traffic(ledger.rows)})
            on.hand_in(f"step {number}", result())
        on.report("host", {"seconds": perf_counter() - began, **gauges.read()})
        on.report("steps", steps)

    observe.__name__ = NAME
    claim = Claim(observe)

    @claim.judgement
    def _(world: World) -> None:
        for number, expected in enumerate(right(world.nonce, world.size)):
            for rank, found in enumerate(world.handed_in(f"step {number}", expected)):
                off = next((name for name, each in expected.items() if not near(found[name], each, tolerance)), "")
                world.require(not off, f"rank {rank}'s result is wrong in step {number}: {off}", rank)
        sent = min(map(sum, zip(*_of_steps(world, "sent"), strict=True)))
        words = f"{sent:,} bytes are counted in a step on all {world.size} ranks together, and no way needs fewer than "
        words += f"{least * world.size:,}"
        # Each of a step's counts is rounded to a byte.
        world.require(sent >= (least - 1) * world.size, f"{words}: send everything through comm, which counts it")

    return Golf(what, Check(claim, (ranks,), only=only), least)


def stroke_of(world: World) -> Stroke:
    """The result of a world that passed. Raises BadEvidence."""
    sent, seconds = _of_steps(world, "sent"), _of_steps(world, "seconds")
    slowest = [max(of_step) for of_step in zip(*seconds, strict=True)][1:]
    return Stroke(int(max(map(max, sent))), statistics.median(slowest), world.reported("host", dict))


def _of_steps(world: World, key: str) -> list[list[float]]:
    """What each rank reported of its steps. Raises BadEvidence."""
    found = []
    for rank, steps in enumerate(world.reported("steps", list)):
        rows = [step if isinstance(step, dict) else {} for step in steps]
        values = [row.get(key, -1) if key == "seconds" else count_of(row, key) for row in rows]
        if len(values) != STEPS or not all(type(each) in (int, float) and 0 <= each < 1e15 for each in values):
            raise BadEvidence(f"rank {rank} did not report its steps")
        found.append(values)
    return found
