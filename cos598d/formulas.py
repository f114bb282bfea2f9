"""What each sync sends and holds, by formula: one row per sync. The ledger and the memory are measured.

`--dry_run`, `check` and the report read it. In the formulas:

    S  bytes of the trainable weights, and so of the gradients        n  ranks
    P  how many tensors these are                                     r  a rank
    B  buckets, or units of `zero1`                                   h  hosts, each with n/h ranks
    L  layers that `zero3` gathers one by one                         a  micro-batches of a step
    E  bytes of embeddings that are only looked up                    H  steps from one average of weights to the next
    u  the share of their rows that some rank looks up in a step
    v  the share of their rows that a rank looks up itself
"""

from collections.abc import Callable
from dataclasses import dataclass

from cos598d.comm.gloo import broadcast_bytes, reduce_bytes

MIB = 1 << 20
# Bytes of weights, gradients, optimizer state, and what the sync keeps besides gradients.
Held = tuple[float, float, float, float]


@dataclass(frozen=True)
class Job:
    """A step of training. sizes: the bytes of each trainable tensor, in the model's order. state: bytes that the
    optimizer keeps for each byte of weights (AdamW: 2, SGD with momentum: 1)."""

    sizes: tuple[int, ...]
    n: int
    a: int = 1
    state: float = 2.0
    bucket_mb: float = 25.0
    first_bucket_mb: float = 1.0
    h: int = 1
    L: int = 1
    E: int = 0
    u: float = 1.0
    v: float = 1.0
    H: int = 1

    @property
    def S(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    @property
    def P(self) -> int:
        """How many tensors there are."""
        return len(self.sizes)

    @property
    def B(self) -> int:
        """How many buckets: a tensor that does not fit into the open one opens the next. The first one is small."""
        count, room = 0, -1.0
        for size in reversed(self.sizes):
            if size > room:
                count, room = count + 1, (self.bucket_mb if count else min(self.first_bucket_mb, self.bucket_mb)) * MIB
            room -= size
        return count


@dataclass(frozen=True)
class Facts:
    """A sync in numbers.

    sent    bytes of gradients and weights that rank r sends in a step, on average over steps
    calls   its calls of a step, on average over steps
    held    bytes that a rank holds just before the optimizer's step, as `Held`
    """

    sent: Callable[[Job, int], float]
    calls: Callable[[Job], float]
    held: Callable[[Job], Held]


def passes(j: Job, count: float, size: float | None = None) -> float:
    """So many reduce-scatters or all-gathers of a size, by default S: (n-1)/n of it each."""
    return count * (j.n - 1) / j.n * (j.S if size is None else size)


def both_ways(j: Job, r: int = 0) -> float:
    """An all-reduce, or a reduce-scatter and an all-gather: 2(n-1)/n S."""
    return passes(j, 2)


def replica(j: Job, buffers: float = 0.0) -> Held:
    """A whole model on every rank, and buffers."""
    return j.S, j.S, j.state * j.S, buffers


def children(n: int, r: int) -> int:
    """How many ranks are directly under rank r in a binomial tree."""
    return sum(1 for k in range(n.bit_length()) if not r % (2 << k) and r + (1 << k) < n)


def folded(j: Job, r: int) -> float:
    """Halving and doubling among the p ranks that are a power of two, to which the others are folded."""
    p = 1 << (j.n.bit_length() - 1)
    return j.S if r >= p else 2 * (p - 1) / p * j.S + (j.S if r + p < j.n else 0)


def among_hosts(j: Job, r: int) -> float:
    """A reduce to the first rank of each host, an all-reduce among these, and a broadcast on each host."""
    m, place = j.n // j.h, r % (j.n // j.h)
    within = j.B * reduce_bytes(j.S // max(j.B, 1), m, place, not place)[0] + broadcast_bytes(j.S, m, place)[0]
    return within + (0 if place else 2 * (j.h - 1) / j.h * j.S)


def through_a_root(j: Job, r: int) -> float:
    """A reduce to rank 0 and a broadcast of every tensor."""
    return sum(reduce_bytes(s, j.n, r, r == 0)[0] + broadcast_bytes(s, j.n, r)[0] for s in j.sizes)


FACTS: dict[str, Facts] = {
    "none": Facts(lambda j, r: 0, lambda j: 0, replica),
    "gather_scatter": Facts(lambda j, r: j.S * (1 if r else j.n - 1), lambda j: 2 * j.P, replica),
    "reduce_broadcast": Facts(through_a_root, lambda j: 2 * j.P, replica),
    "all_reduce": Facts(both_ways, lambda j: j.P, replica),
    "flat": Facts(both_ways, lambda j: 1, replica),
    "overlap": Facts(both_ways, lambda j: j.P, replica),
    "bucketed": Facts(both_ways, lambda j: j.B, replica),
    "ring": Facts(both_ways, lambda j: 1, replica),
    "halving_doubling": Facts(folded, lambda j: 1, replica),
    "tree": Facts(lambda j, r: j.S * (children(j.n, r) + (r > 0)), lambda j: 1, replica),
    "shared_memory": Facts(lambda j, r: 0, lambda j: j.B, lambda j: replica(j, j.S / j.n)),
    "hierarchical": Facts(among_hosts, lambda j: (2 * (j.h < j.n) + (j.h > 1)) * j.B, replica),
    "sparse_rows": Facts(lambda j, r: passes(j, 2, j.S - j.E + j.E * j.u), lambda j: j.B, replica),
    "local_sgd": Facts(lambda j, r: both_ways(j) / j.H, lambda j: 1 / j.H, replica),
    "diloco": Facts(lambda j, r: both_ways(j) / j.H, lambda j: 1 / j.H, lambda j: replica(j, 2 * j.S)),
    "ddp": Facts(both_ways, lambda j: j.B, lambda j: replica(j, j.S)),
    "zero1": Facts(both_ways, lambda j: 2 * j.B, lambda j: (j.S, j.S, j.state * j.S / j.n, j.S)),
    "zero2": Facts(
        lambda j, r: passes(j, j.a + 1),
        lambda j: (j.a + 1) * j.B,
        lambda j: (j.S, j.S / j.n, j.state * j.S / j.n, 0),
    ),
    "zero3": Facts(
        lambda j, r: j.a * (passes(j, 3) - passes(j, 1, j.E)),
        lambda j: 3 * j.a * j.L,
        lambda j: (j.S / j.n, j.S / j.n, j.state * j.S / j.n, 0),
    ),
    "sparse_zero1": Facts(
        lambda j, r: passes(j, 2, j.S - j.E) + (j.n - 1) * j.v * j.E,
        lambda j: 2 * j.B + (j.E > 0),
        lambda j: (j.S, j.S, j.state * (j.E + (j.S - j.E) / j.n), 0),
    ),
    "shared_weights": Facts(lambda j, r: 0, lambda j: 0, lambda j: (j.S / j.n, j.S, j.state * j.S / j.n, 0)),
}
