"""Lesson 9's right predictions, by the library's formulas, and those of typical mistakes. Only the judge loads it."""

from collections.abc import Callable, Sequence
from typing import Any

from cos598d.sync.cost import Collective, Even, both_ways, ring_steps
from cos598d.sync.gather_scatter import GATHER, SCATTER
from cos598d.tools.learn.lessons.lesson9.checks import WAYS

GATHERED, EXCHANGE, RING = WAYS
CALLS: dict[str, tuple[Collective, ...]] = {
    GATHERED: (GATHER, SCATTER),
    EXCHANGE: (Even("all_gather", lambda ranks: 1, lambda ranks: (ranks - 1, 1)),),
    RING: (Even("all_reduce", ring_steps, both_ways),),
}


def sent(way: str, size: int, ranks: int, rank: int) -> float:
    """Bytes, as the communication log counts them."""
    return float(sum(call.moved(size, 1, ranks, rank)[0] for call in CALLS[way]))


def seconds(way: str, size: float, ranks: int, rate: float, delay: float) -> float:
    """By the cost model, where calls and bytes cost a processor nothing."""
    loads = [call.load(size, ranks) for call in CALLS[way]]
    return sum(load.link_bytes * 8 / rate + load.steps * delay for load in loads)


def step_seconds(buckets: Sequence[tuple[float, int]], backward: float, ranks: int, rate: float, delay: float) -> float:
    """Rings that cost a processor nothing, one after another on one link, as soon as their gradients are ready."""
    ended = 0.0
    for (ready, _), travel in zip(buckets, _each(buckets, ranks, rate, delay), strict=True):
        ended = max(ended, ready) + travel
    return max(backward, ended)


def _each(buckets: Sequence[tuple[float, int]], ranks: int, rate: float, delay: float) -> list[float]:
    return [seconds(RING, size, ranks, rate, delay) for _, size in buckets]


def _only(way: str, right: Callable[..., float], wrong: Callable[..., float]) -> Callable[..., float]:
    """A formula that is wrong for one of the ways."""
    return lambda of, *arguments: wrong(*arguments) if of == way else right(of, *arguments)


# By function and way: what is said of predictions that are those of a mistake.
OF_BYTES: dict[str, dict[str, Callable[..., float]]] = {
    GATHERED: {"rank 0 sends the average to each of the n-1 others": lambda size, n, rank: size},
    EXCHANGE: {"every rank sends its tensor to n-1 others": lambda size, n, rank: size},
    RING: {
        "that is one way round: the sums have to go round as well": lambda size, n, rank: (n - 1) * size / n,
        "each of the 2(n-1) messages is an n-th of the tensor": lambda size, n, rank: 2 * (n - 1) * size,
        "a rank passes on n-1 of the n parts, twice": lambda size, n, rank: 2 * size,
    },
}
OF_SECONDS: dict[str, dict[str, Callable[..., float]]] = {
    GATHERED: {
        "that is only the gather: the average has to be sent back": lambda s, n, r, d: (n - 1) * 8 * s / r + d,
        "rank 0's link carries n-1 tensors in each phase, not one": lambda s, n, r, d: 2 * (8 * s / r + d),
        "messages sent together take the delay once per phase": lambda s, n, r, d: 2 * (n - 1) * (8 * s / r + d),
        "both phases take the delay": lambda s, n, r, d: 2 * (n - 1) * 8 * s / r + d,
    },
    EXCHANGE: {
        "a rank's link carries n-1 tensors, not one": lambda s, n, r, d: 8 * s / r + d,
        "messages sent together take the delay once": lambda s, n, r, d: (n - 1) * (8 * s / r + d),
    },
    RING: {
        "each of the 2(n-1) steps takes the delay": lambda s, n, r, d: 2 * (n - 1) * 8 * s / n / r + d,
        "each step carries an n-th of the tensor": lambda s, n, r, d: 2 * (n - 1) * (8 * s / r + d),
        "that is one way round: the sums have to go round, too": lambda s, n, r, d: (n - 1) * (8 * s / n / r + d),
    },
}


def _mistakes(right: Callable[..., float], by_way: dict[str, dict[str, Callable[..., float]]]) -> dict[str, Any]:
    return {words: _only(way, right, wrong) for way, ways in by_way.items() for words, wrong in ways.items()}


MISTAKES: dict[str, dict[str, Callable[..., float]]] = {
    "sent": {"expected bytes, and a byte has eight bits": lambda *of: 8 * sent(*of)} | _mistakes(sent, OF_BYTES),
    "seconds": {
        "a byte has eight bits": lambda way, s, *of: seconds(way, s / 8, *of),
        "the delay is left out": lambda w, s, n, r, d: seconds(w, s, n, r, 0.0),
        **_mistakes(seconds, OF_SECONDS),
    },
    "step_seconds": {
        "the delay is left out": lambda b, back, n, r, d: step_seconds(b, back, n, r, 0.0),
        "a step does not end before backward does": lambda b, back, *of: step_seconds(b, 0.0, *of),
        "buckets are sent during backward, not after it": lambda b, back, *of: back + sum(_each(b, *of)),
        "a bucket cannot begin before its gradients are there": lambda b, back, *of: max(back, sum(_each(b, *of))),
        "a bucket waits until the one before it has arrived": lambda b, back, *of: max(
            back, *(ready + own for (ready, _), own in zip(b, _each(b, *of), strict=True))
        ),
        "buckets may arrive after backward has ended": lambda b, back, *of: back,
        "the last bucket may wait for others, or be there before backward ends": lambda b, back, *of: (
            back + _each(b, *of)[-1]
        ),
    },
}
