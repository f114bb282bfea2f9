"""What each sync sends and holds per step, by formula: one row per sync. The ledger and `memory` are the measurements.

S: bytes of the gradients, P: how many tensors, n: ranks, r: a rank, B: buckets, a: micro-batches of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from cos598d.heart.comm.gloo import broadcast_bytes, reduce_bytes


@dataclass(frozen=True)
class Job:
    """A step: its sizes, as above. state: bytes of optimizer state per byte of weights (AdamW: 2). sizes: the tensors'
    bytes. touched: the share of the gradient's bytes that some rank uses (sparse_rows)."""

    sizes: tuple[int, ...]
    n: int
    bucket: float = 25 << 20
    a: int = 1
    state: float = 2.0
    touched: float = 1.0

    @property
    def S(self) -> int:
        return sum(self.sizes)

    @property
    def P(self) -> int:
        return len(self.sizes)

    @property
    def B(self) -> int:
        return max(1, ceil(self.S / self.bucket))


@dataclass(frozen=True)
class Facts:
    """A sync in numbers. sent: bytes that rank r sends per step. calls: of a step. waits: messages that wait for one
    another in a call. held: bytes of (weights, gradients, optimizer state, buffers) just before a step."""

    sent: Callable[[Job, int], float]
    calls: Callable[[Job], int]
    waits: Callable[[int], float]
    held: Callable[[Job], tuple[float, float, float, float]]


def both_ways(j: Job, r: int = 0) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * (j.n - 1) / j.n * j.S


def once(j: Job, passes: float) -> float:
    """That many reduce-scatters or all-gathers."""
    return passes * (j.n - 1) / j.n * j.S


def ring(n: int) -> int:
    return 2 * (n - 1)


def whole(j: Job) -> tuple[float, float, float, float]:
    return j.S, j.S, j.state * j.S, 0


def buffered(j: Job) -> tuple[float, float, float, float]:
    """Gradients are views of the buffers."""
    return j.S, 0, j.state * j.S, j.S


def folded(j: Job, r: int) -> float:
    p = 1 << (j.n.bit_length() - 1)
    return j.S if r >= p else 2 * (p - 1) / p * j.S + (j.S if r + p < j.n else 0)


def children(n: int, r: int) -> int:
    return sum(1 for k in range(n.bit_length()) if not r % (2 << k) and r + (1 << k) < n)


FACTS = {
    "none": Facts(lambda j, r: 0, lambda j: 0, lambda n: 0, whole),
    "gather_scatter": Facts(lambda j, r: j.S * (j.n - 1 if r == 0 else 1), lambda j: 2 * j.P, lambda n: 1, whole),
    "reduce_broadcast": Facts(
        lambda j, r: sum(reduce_bytes(s, j.n, r, r == 0)[0] + broadcast_bytes(s, j.n, r)[0] for s in j.sizes),
        lambda j: 2 * j.P, lambda n: n - 1 + ceil(log2(n)), whole,
    ),
    "all_reduce": Facts(both_ways, lambda j: j.P, ring, whole),
    "overlap": Facts(both_ways, lambda j: j.P, ring, buffered),
    "flat": Facts(both_ways, lambda j: 1, ring, buffered),
    "bucketed": Facts(both_ways, lambda j: j.B, ring, buffered),
    "ddp": Facts(both_ways, lambda j: j.B, ring, lambda j: (j.S, j.S, j.state * j.S, j.S)),
    "ring": Facts(both_ways, lambda j: 1, ring, buffered),
    "halving_doubling": Facts(folded, lambda j: 1, lambda n: 2 * ceil(log2(n)), buffered),
    "tree": Facts(lambda j, r: j.S * (children(j.n, r) + (r > 0)), lambda j: 1, lambda n: 2 * ceil(log2(n)), buffered),
    "shared_memory": Facts(lambda j, r: 0, lambda j: j.B, lambda n: 0, buffered),
    "sparse_rows": Facts(lambda j, r: both_ways(j) * j.touched, lambda j: j.B + 2, ring, buffered),
    "zero1": Facts(
        lambda j, r: once(j, 2), lambda j: 2 * j.B, lambda n: 2, lambda j: (j.S, j.S, j.state * j.S / j.n, 0)
    ),
    "zero2": Facts(
        lambda j, r: once(j, j.a + 1), lambda j: (j.a + 1) * j.B, lambda n: 2,
        lambda j: (j.S, j.S / j.n, j.state * j.S / j.n, 0),
    ),
    "zero3": Facts(
        lambda j, r: once(j, 3 * j.a), lambda j: 3 * j.a * j.B, lambda n: 2,
        lambda j: (j.S / j.n, j.S / j.n, j.state * j.S / j.n, 0),
    ),
}  # fmt: skip
