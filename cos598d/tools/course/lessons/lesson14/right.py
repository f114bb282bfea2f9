"""The right numbers of lesson 14, and those of typical mistakes."""

import math
from collections.abc import Callable
from typing import Any


def flops(layers: int, width: int, inner: int, tokens: int) -> float:
    """Four products with (width, width), two with (width, inner), two of tokens with tokens; backward has two each."""
    return counted(4, 2, 2, layers, width, inner, tokens)


def counted(square: int, mlp: int, attention: int, n: int, w: int, i: int, t: int) -> float:
    """Forward and backward of n layers with so many products of each kind."""
    return 3.0 * n * 2 * t * (square * w * w + mlp * w * i + attention * t * w)


def roofline(operations: float, moved: float, peak: float, bandwidth: float) -> float:
    """Seconds of the slower of the two."""
    return max(operations / peak, moved / bandwidth)


def shares(phases: list[list[float]], peak: float) -> list[float]:
    """The MFU of each phase and of all."""
    whole = [sum(part) for part in zip(*phases, strict=True)]
    return [operations / (seconds * peak) for operations, seconds in [*phases, whole]]


def step_seconds(operations: float, rate: float, size: float, bandwidth: float, latency: float, ranks: int) -> float:
    """Of `operations`, and then of a ring of 2(n-1) messages."""
    return operations / rate + 2 * (ranks - 1) * (size / ranks / bandwidth + latency)


def least_tokens(rate: float, bandwidth: float, ranks: int, number_bytes: float) -> float:
    """Where backward's 4 operations per parameter and token take as long as the ring's bytes."""
    return 2 * (ranks - 1) / ranks * number_bytes / bandwidth * rate / 4


def large_model(**of: Any) -> dict[str, Any]:
    """All numbers of a model's training."""
    rate, state = of["peak"] * of["share"], 16 * of["parameters"]
    operations, each = 6 * of["parameters"] * of["tokens"], of["batch"] / of["gpus"]
    least = least_tokens(rate, of["bandwidth"], of["gpus"], 2)
    return {
        "operations": operations,
        "days": operations / (of["gpus"] * rate) / 86400,
        "state_bytes": state,
        "gpus_to_hold": math.ceil(state / of["memory"]),
        "tokens_each": each,
        "least_tokens": least,
        "link_decides": each < least,
    }


# By function: what is said of results that are those of a mistake, in every setting.
MISTAKES: dict[str, dict[str, Callable[..., Any]]] = {
    "flops": {
        "that is half: a multiplication and an addition are two operations": lambda *of: flops(*of) / 2,
        "that is forward only: backward needs twice as many operations again": lambda *of: flops(*of) / 3,
        "that is two thirds: forward has each product once, and backward has two for it": lambda *of: flops(*of) / 1.5,
        "each token with each token is left out: attention has two such products": lambda *of: counted(4, 2, 0, *of),
        "each token with each token comes twice: the scores, and their sum": lambda *of: counted(4, 2, 1, *of),
        "that is one layer: there are as many as `layers`": lambda n, *of: flops(1, *of),
        "the MLP has two products": lambda *of: counted(4, 1, 2, *of),
        "four products have a (width, width) matrix": lambda *of: counted(3, 2, 2, *of),
    },
    "roofline": {
        "both happen at once: take the longer time, not the sum": lambda o, m, p, b: o / p + m / b,
        "the slower of the two decides: take the longer time, not the shorter": lambda o, m, p, b: min(o / p, m / b),
        "the time of memory is left out": lambda o, m, p, b: o / p,
        "the time of computing is left out": lambda o, m, p, b: m / b,
        "that is a rate in operations per second, expected seconds": lambda o, m, p, b: min(p, o / m * b),
        "a bandwidth is in bytes per second here, not in bits": lambda o, m, p, b: max(o / p, 8 * m / b),
    },
    "shares": {
        "the last is the mean of the shares: divide all operations by all seconds": (
            lambda phases, peak: [*shares(phases, peak)[:-1], sum(shares(phases, peak)[:-1]) / len(phases)]
        ),
        "the last, of all phases together, is missing": lambda *of: shares(*of)[:-1],
        "that is in percent, expected a share from 0 to 1": lambda *of: [100 * each for each in shares(*of)],
        "that is operations per second: divide by the peak": lambda *of: [each * of[1] for each in shares(*of)],
    },
    "step_seconds": {
        "the latency is left out": lambda o, r, s, b, d, n: step_seconds(o, r, s, b, 0.0, n),
        "each of the 2(n-1) messages takes the latency": lambda o, r, s, b, d, n: step_seconds(o, r, s, b, 0.0, n) + d,
        "a bandwidth is in bytes per second here, not in bits": lambda o, r, s, *of: step_seconds(o, r, 8 * s, *of),
        "the computing is left out": lambda o, *of: step_seconds(0.0, *of),
        "the ring begins when backward has ended: add its time": lambda o, r, *of: max(o / r, step_seconds(0, r, *of)),
        "that is one way round: the sums have to go round as well": lambda o, r, *of: (
            o / r + step_seconds(0, r, *of) / 2
        ),
        "each message carries an n-th of the bytes": lambda o, r, s, *of: step_seconds(o, r, s * of[-1], *of),
        "`operations` are of one rank: do not divide them by the ranks": lambda o, *of: step_seconds(o / of[-1], *of),
        "the time of the ring is left out": lambda o, r, *of: o / r,
    },
    "least_tokens": {
        "the ring runs during backward: 4 operations per parameter and token, not 6": lambda *of: (
            least_tokens(*of) / 1.5
        ),
        "the ring runs during backward: 4 operations per parameter and token, not 2": lambda *of: least_tokens(*of) * 2,
        "a ring carries 2(n-1)/n of the bytes, not all once": lambda r, b, n, k: k / b * r / 4,
        "a ring carries 2(n-1)/n of the bytes: n-1 of the n parts, twice": lambda r, b, n, k: 2 * k / b * r / 4,
        "that is one way round: the sums have to go round as well": lambda *of: least_tokens(*of) / 2,
        "a gradient has `number_bytes` bytes per parameter": lambda r, b, n, k: least_tokens(r, b, n, 1),
        "a bandwidth is in bytes per second here, not in bits": lambda *of: least_tokens(*of) * 8,
        "that is of all ranks together, expected per rank": lambda r, b, n, k: least_tokens(r, b, n, k) * n,
        "that is upside down: more tokens are needed on a slower link": lambda *of: 1 / least_tokens(*of),
    },
}

# By key: what is said of a large model's number that is so many times the right one.
FACTORS: dict[str, dict[str, Callable[[dict[str, Any]], float]]] = {
    "operations": {"that is forward only": lambda of: 1 / 3, "forward's 2 and backward's 4 are 6": lambda of: 2 / 3},
    "days": {
        "that is in hours": lambda of: 24,
        "that is in seconds": lambda of: 86400,
        "only a share of the peak is used": lambda of: of["share"],
        "all GPUs work at once": lambda of: of["gpus"],
    },
    "state_bytes": {
        "that is the weights only": lambda of: 1 / 8,
        "that is weights and gradients only": lambda of: 1 / 4,
        "the weights and gradients in bf16 count too": lambda of: 3 / 4,
    },
    "tokens_each": {"each GPU has a share of the batch": lambda of: of["gpus"]},
    "least_tokens": {
        "the GPUs compute at their share of the peak, not at the peak": lambda of: 1 / of["share"],
        "a gradient in bf16 has 2 bytes": lambda of: 2,
        "that is one way round": lambda of: 1 / 2,
    },
}
