"""Lesson 9, the wire: predicted bytes and seconds against formulas. No link is made for it, and nothing is timed."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from cos598d.comm.gloo import bytes_moved
from cos598d.tools.course.formulas import agree, call_each

GATHERED, EXCHANGE, RING = WAYS = ("gather_scatter", "exchange", "ring")
CALLS = {GATHERED: ("gather", "scatter"), EXCHANGE: ("all_gather",), RING: ("all_reduce",)}
WITHIN, SETTINGS = 0.1, 10
Buckets = Sequence[tuple[float, int]]


def sent(way: str, size: int, ranks: int, rank: int) -> float:
    """Bytes, as the communication log counts them."""
    return float(sum(bytes_moved(op, size, ranks, rank)[0] for op in CALLS[way]))


def seconds(way: str, size: float, ranks: int, rate: float, delay: float) -> float:
    """By the bytes on the busiest link, and the delays that come one after the other."""
    if way == GATHERED:
        return 2 * ((ranks - 1) * 8 * size / rate + delay)
    if way == EXCHANGE:
        return (ranks - 1) * 8 * size / rate + delay
    return 2 * (ranks - 1) * (8 * size / ranks / rate + delay)


def step_seconds(buckets: Buckets, backward: float, ranks: int, rate: float, delay: float) -> float:
    """Bucket by bucket: each begins when its gradients are there and the one before has arrived."""
    ended = 0.0
    for ready, size in buckets:
        ended = max(ended, ready) + seconds(RING, size, ranks, rate, delay)
    return max(backward, ended)


def each(buckets: Buckets, ranks: int, rate: float, delay: float) -> list[float]:
    """The seconds of each bucket's ring."""
    return [seconds(RING, size, ranks, rate, delay) for _, size in buckets]


# By way: what is said of predictions that are those of a mistake.
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
OF_STEPS: dict[str, Callable[..., float]] = {
    "the delay is left out": lambda b, back, n, r, d: step_seconds(b, back, n, r, 0.0),
    "a step does not end before backward does": lambda b, back, *of: step_seconds(b, 0.0, *of),
    "buckets are sent during backward, not after it": lambda b, back, *of: back + sum(each(b, *of)),
    "a bucket cannot begin before its gradients are there": lambda b, back, *of: max(back, sum(each(b, *of))),
    "a bucket waits until the one before it has arrived": lambda b, back, *of: max(
        back, *(ready + own for (ready, _), own in zip(b, each(b, *of), strict=True))
    ),
    "buckets may arrive after backward has ended": lambda b, back, *of: back,
    "the last bucket may wait for others, or be there before backward ends": lambda b, back, *of: (
        back + each(b, *of)[-1]
    ),
}


def by_way(right: Callable[..., float], mistakes: dict[str, dict[str, Callable[..., float]]]) -> dict[str, Any]:
    """The mistakes, each as a formula that is wrong for one of the ways."""

    def only(way: str, wrong: Callable[..., float]) -> Callable[..., float]:
        return lambda of, *arguments: wrong(*arguments) if of == way else right(of, *arguments)

    return {words: only(way, wrong) for way, ways in mistakes.items() for words, wrong in ways.items()}


def links(seed: int) -> list[tuple[int, int, float, float]]:
    """Bytes, ranks, rate and delay: in some bytes take most of a ring's seconds, in some the delay, in some both."""
    draw, found = random.Random(seed), []
    for number in range(SETTINGS):
        ranks, rate, delay = draw.randint(3, 12), 10 ** draw.uniform(7, 10), 10 ** draw.uniform(-4, -1.5)
        balance = (0.02, 0.3, 1.0, 3.0, 50.0)[number % 5]
        found.append((round(balance * delay * rate / 8 * ranks), ranks, rate, delay))
    return found


def steps(seed: int) -> list[tuple[Any, ...]]:
    """Steps of all kinds: hidden altogether, queueing one after the other, waiting for gradients; by rate, by delay."""
    draw, found = random.Random(seed + 1), []
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


def test_predicts_bytes(ranks, seed, n):
    """The bytes that each rank sends to average a tensor, as the communication log counts them, in all three ways."""
    calls = [(way, size, count, rank) for way in WAYS for size, count, *_ in links(seed) for rank in range(count)]
    of_bits = {"expected bytes, and a byte has eight bits": lambda *of: 8 * sent(*of)}
    agree(ranks(n, call_each, "sent", calls), sent, calls, of_bits | by_way(sent, OF_BYTES), WITHIN)


def test_predicts_seconds(ranks, seed, n):
    """The seconds of each way, within 10 % of the formula, on links where bytes decide and where delays do."""
    calls = [(way, *link) for way in WAYS for link in links(seed)]
    mistakes = {
        "a byte has eight bits": lambda way, s, *of: seconds(way, s / 8, *of),
        "the delay is left out": lambda w, s, n, r, d: seconds(w, s, n, r, 0.0),
    }
    agree(ranks(n, call_each, "seconds", calls), seconds, calls, mistakes | by_way(seconds, OF_SECONDS), WITHIN)


def test_predicts_a_step(ranks, seed, n):
    """The seconds until backward has ended and all buckets sent during it have arrived, within 10 %."""
    calls = steps(seed)
    agree(ranks(n, call_each, "step_seconds", calls), step_seconds, calls, OF_STEPS, WITHIN)
