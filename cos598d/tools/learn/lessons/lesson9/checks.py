"""Lesson 9, the wire: predicted bytes against the communication log's formulas, seconds against the cost model.

Predictions are compared with formulas: no link is made for it, and nothing is timed.
"""

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cos598d.cost.model import beside_backward
from cos598d.sync.cost import Collective, Even, both_ways, ring_steps
from cos598d.sync.gather_scatter import GATHER, SCATTER
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.golf import STEPS as GOLF_STEPS
from cos598d.tools.learn.lessons.golf import Results, Turn, golf_of

WITHIN = 0.1
SETTINGS = 10
GATHERED, EXCHANGE, RING = "gather_scatter", "exchange", "ring"
WAYS: dict[str, tuple[Collective, ...]] = {
    GATHERED: (GATHER, SCATTER),
    EXCHANGE: (Even("all_gather", lambda ranks: 1, lambda ranks: (ranks - 1, 1)),),
    RING: (Even("all_reduce", ring_steps, both_ways),),
}

Setting = tuple[int, int, float, float]  # bytes, ranks, bits a second, seconds of delay
Prediction = Callable[[int, int, float, float], float]

# What is said of predictions that are those of a mistake, in every setting.
OF_BYTES: dict[str, tuple[tuple[str, Callable[[int, int], float]], ...]] = {
    GATHERED: (("rank 0 sends the average to each of the n-1 others", lambda size, n: size),),
    EXCHANGE: (("every rank sends its tensor to n-1 others", lambda size, n: size),),
    RING: (
        ("that is one way round: the sums have to go round as well", lambda size, n: (n - 1) * size / n),
        ("each of the 2(n-1) messages is an n-th of the tensor", lambda size, n: 2 * (n - 1) * size),
        ("a rank passes on n-1 of the n parts, twice", lambda size, n: 2 * size),
    ),
}
OF_SECONDS: dict[str, tuple[tuple[str, Prediction], ...]] = {
    GATHERED: (
        ("that is only the gather: the average has to be sent back", lambda s, n, r, d: (n - 1) * 8 * s / r + d),
        ("rank 0's link carries n-1 tensors in each phase, not one", lambda s, n, r, d: 2 * (8 * s / r + d)),
        ("messages sent together take the delay once per phase", lambda s, n, r, d: 2 * (n - 1) * (8 * s / r + d)),
        ("both phases take the delay", lambda s, n, r, d: 2 * (n - 1) * 8 * s / r + d),
    ),
    EXCHANGE: (
        ("a rank's link carries n-1 tensors, not one", lambda s, n, r, d: 8 * s / r + d),
        ("messages sent together take the delay once", lambda s, n, r, d: (n - 1) * (8 * s / r + d)),
    ),
    RING: (
        ("each of the 2(n-1) steps takes the delay", lambda s, n, r, d: 2 * (n - 1) * 8 * s / n / r + d),
        ("each step carries an n-th of the tensor", lambda s, n, r, d: 2 * (n - 1) * (8 * s / r + d)),
        ("that is one way round: the sums have to go round as well", lambda s, n, r, d: (n - 1) * (8 * s / n / r + d)),
    ),
}


def seconds_of(way: str, size: float, ranks: int, rate: float, delay: float) -> float:
    """Seconds of a tensor's average where calls and bytes cost a processor nothing, by the cost model."""
    loads = [call.load(size, ranks) for call in WAYS[way]]
    return sum(load.link_bytes * 8 / rate + load.steps * delay for load in loads)


def settings(nonce: int) -> list[Setting]:
    """Tensors, ranks and links of all kinds: in some bytes take most of the time, in some the delay, in some both."""
    draw = random.Random(nonce)
    found = []
    for number in range(SETTINGS):
        ranks, rate = draw.randint(3, 12), 10 ** draw.uniform(7, 10)
        delay = 10 ** draw.uniform(-4, -1.5)
        # The bytes' share of a ring's seconds.
        balance = (0.02, 0.3, 1.0, 3.0, 50.0)[number % 5]
        found.append((round(balance * delay * rate / 8 * ranks), ranks, rate, delay))
    return found


@Claim
def predicts_bytes(on: OnLesson) -> None:
    """The bytes that each rank sends to average a tensor, as the communication log counts them, in all three ways."""
    for way in WAYS:
        found = [
            [float(on.student.sent(way, size, ranks, rank)) for rank in range(ranks)]
            for size, ranks, _, _ in settings(on.nonce)
        ]
        on.report(way, found)


@predicts_bytes.judgement
def _(world: World) -> None:
    for way, calls in WAYS.items():
        found = _numbers(world, way)
        rows = []
        for (size, ranks, _, _), by_rank in zip(settings(world.nonce), found, strict=True):
            expected = [sum(call.moved(size, 1, ranks, rank)[0] for call in calls) for rank in range(ranks)]
            rows += [(size, ranks, rank, *pair) for rank, pair in enumerate(zip(by_rank, expected, strict=True))]
        off = [row for row in rows if not _is_near(*row[3:])]
        if off:
            size, ranks, rank, was, right = off[0]
            why = _why([(was, made(size, ranks)) for size, ranks, _, was, _ in off] for _, made in OF_BYTES[way])
            what = f"sent({way!r}, {size}, {ranks}, rank={rank}) is {_plain(was)}, expected {right}"
            world.require(False, what + _reason(OF_BYTES[way], why, [(row[3], row[4]) for row in rows]))
            return


@Claim
def predicts_seconds(on: OnLesson) -> None:
    """The seconds of each way, within 10 % of the cost model, on links where bytes decide and where delays do."""
    for way in WAYS:
        on.report(way, [float(on.student.seconds(way, *setting)) for setting in settings(on.nonce)])


@predicts_seconds.judgement
def _(world: World) -> None:
    for way in WAYS:
        given = settings(world.nonce)
        found = _numbers(world, way)
        pairs = [(was, seconds_of(way, *setting)) for was, setting in zip(found, given, strict=True)]
        off = next((number for number, pair in enumerate(pairs) if not _is_near(*pair)), None)
        if off is not None:
            mistakes = OF_SECONDS[way]
            no_delay = ("the delay is left out", lambda s, n, r, d, way=way: seconds_of(way, s, n, r, 0.0))
            mistakes = (no_delay, *mistakes)
            bits = ("a byte has eight bits", lambda s, n, r, d, way=way: seconds_of(way, s / 8, n, r, d))
            mistakes = (bits, *mistakes)
            why = _why(
                [(was, made(*setting)) for was, setting in zip(found, given, strict=True)] for _, made in mistakes
            )
            size, ranks, rate, delay = given[off]
            call = f"seconds({way!r}, {size}, {ranks}, rate={rate:.4g}, delay={delay:.4g})"
            what = f"{call} is {_plain(pairs[off][0])}, expected {_plain(pairs[off][1])}"
            world.require(False, what + _reason(mistakes, why, pairs))
            return


@Claim
def predicts_a_step(on: OnLesson) -> None:
    """The seconds until backward has ended and all buckets sent during it have arrived, within 10 %."""
    on.report("seconds", [float(on.student.step_seconds(*step)) for step in steps(on.nonce)])


@predicts_a_step.judgement
def _(world: World) -> None:
    given, found = steps(world.nonce), _numbers(world, "seconds")
    pairs = [(was, step_of_model(*step)) for was, step in zip(found, given, strict=True)]
    off = next((number for number, pair in enumerate(pairs) if not _is_near(*pair)), None)
    if off is None:
        return
    why = _why([(was, made(*step)) for was, step in zip(found, given, strict=True)] for _, made in OF_STEPS)
    buckets, backward, ranks, rate, delay = given[off]
    shown = ", ".join(f"({ready:.3g}, {size})" for ready, size in buckets)
    call = f"step_seconds([{shown}], {backward:.3g}, {ranks}, rate={rate:.4g}, delay={delay:.4g})"
    what = f"{call} is {_plain(pairs[off][0])}, expected {_plain(pairs[off][1])}"
    world.require(False, what + _reason(OF_STEPS, why, pairs))


Step = tuple[list[tuple[float, int]], float, int, float, float]


def steps(nonce: int) -> list[Step]:
    """Steps of all kinds: hidden altogether, queueing behind one another, waiting for gradients; by rate, by delay."""
    draw = random.Random(nonce + 1)
    found = []
    for number in range(SETTINGS):
        ranks, backward, count = draw.randint(2, 8), draw.uniform(0.2, 2.0), draw.randint(3, 6)
        # In every other step the last gradients are there before backward ends: the first layers do not train.
        last = backward if number % 2 == 0 else 0.5 * backward
        ready = sorted(draw.uniform(0.1, 0.95) * last for _ in range(count - 1)) + [last]
        sizes = [draw.randint(1, 30) * 10**6 for _ in ready]
        # What all buckets take together, beside backward, and the delays' part of it.
        load, part = (0.3, 0.8, 1.5, 3.0, 0.05)[number % 5], (0.2, 0.5, 0.9)[number % 3]
        rate = 2 * (ranks - 1) / ranks * 8 * sum(sizes) / ((1 - part) * load * backward)
        delay = part * load * backward / (2 * (ranks - 1) * count)
        found.append((list(zip(ready, sizes, strict=True)), backward, ranks, rate, delay))
    return found


def step_of_model(
    buckets: Sequence[tuple[float, int]], backward: float, ranks: int, rate: float, delay: float
) -> float:
    """Seconds of a step by the cost model, of rings that cost a processor nothing."""
    ready = np.array([moment for moment, _ in buckets])
    travel = np.array([seconds_of(RING, size, ranks, rate, delay) for _, size in buckets])
    ended, _ = beside_backward(ready, np.zeros_like(travel), travel, travel, backward, steals=False)
    return max(backward, ended)


def _each(buckets: Sequence[tuple[float, int]], ranks: int, rate: float, delay: float) -> list[float]:
    return [seconds_of(RING, size, ranks, rate, delay) for _, size in buckets]


OF_STEPS: tuple[tuple[str, Callable[..., float]], ...] = (
    ("the delay is left out", lambda b, back, n, r, d: step_of_model(b, back, n, r, 0.0)),
    ("a step does not end before backward does", lambda b, back, n, r, d: step_of_model(b, 0.0, n, r, d)),
    ("buckets are sent during backward, not after it", lambda b, back, n, r, d: back + sum(_each(b, n, r, d))),
    (
        "a bucket cannot begin before its gradients are there",
        lambda b, back, n, r, d: max(back, sum(_each(b, n, r, d))),
    ),
    (
        "a bucket waits until the one before it has arrived",
        lambda b, back, n, r, d: max(
            back, *(ready + own for (ready, _), own in zip(b, _each(b, n, r, d), strict=True))
        ),
    ),
    ("buckets may arrive after backward has ended", lambda b, back, n, r, d: back),
    (
        "the last bucket may wait for others, or be there before backward ends",
        lambda b, back, n, r, d: back + _each(b, n, r, d)[-1],
    ),
)


def _numbers(world: World, name: str) -> list:
    """What rank 0 reported: numbers, or lists of numbers."""
    found = world.reported(name, list)[0]
    flat = [each for part in found for each in (part if isinstance(part, list) else [part])]
    world.require(all(type(each) is float and math.isfinite(each) for each in flat), f"{name}: not all are numbers")
    return found


def _is_near(found: float, right: float) -> bool:
    return abs(found - right) <= WITHIN * right


def _why(by_mistake) -> int | None:
    """The first mistake whose predictions are those that were found, all of them."""
    for number, pairs in enumerate(by_mistake):
        if all(abs(found - made) <= 1e-3 * abs(made) for found, made in pairs):
            return number
    return None


def _reason(mistakes: Sequence[tuple], why: int | None, pairs: Sequence[tuple[float, float]]) -> str:
    """What is said of it: the mistake, else by what factor all predictions are off, if it is one."""
    if why is not None:
        return f": {mistakes[why][0]}"
    factors = [found / right for found, right in pairs if right]
    if factors and max(factors) - min(factors) < 0.01 * abs(max(factors)):
        factor = factors[0]
        bits = ": a byte has eight bits" if min(abs(factor - 8), abs(8 * factor - 1)) < 0.1 else ""
        return f", and all others are {factor:.3g} times what they should be too{bits}"
    return ""


def _plain(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _golf(on: OnLesson) -> Turn:
    def turn(step: int):
        given = steps(on.nonce + step + 1)
        found: list[float] = []

        def run() -> None:
            found.extend(on.student.step_seconds(*each) for each in given)

        return run, lambda: {"step_seconds": torch.tensor(found, dtype=torch.float64)}

    return turn


def _golf_steps(nonce: int, ranks: int) -> list[Results]:
    by_step = [[step_of_model(*each) for each in steps(nonce + step + 1)] for step in range(GOLF_STEPS)]
    return [{"step_seconds": torch.tensor(found, dtype=torch.float64)} for found in by_step]


CHECKS = Checks(
    (
        Check(predicts_bytes, (1,), about="sent"),
        Check(predicts_seconds, (1,), about="seconds"),
        Check(predicts_a_step, (1,), about="step_seconds"),
    ),
    golf=golf_of(f"{SETTINGS} calls of step_seconds", 1, 0, _golf, _golf_steps, tolerance=WITHIN),
)
