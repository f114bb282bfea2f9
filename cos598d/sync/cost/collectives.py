"""The library's collectives as a rung names them in its `calls`: what each rank moves, and what passes the links."""

from cos598d.comm.gloo import broadcast_bytes, reduce_bytes, ring_segments, root_bytes
from cos598d.sync.cost import Collective, Even, Load


def both_ways(ranks: int) -> tuple[int, int]:
    """A reduce-scatter and an all-gather: 2(n-1)/n of the payload."""
    return 2 * (ranks - 1), ranks


def ring_steps(ranks: int) -> int:
    """Of a reduce-scatter and an all-gather round a ring."""
    return 2 * (ranks - 1)


ALL_REDUCE = Even(ring_steps, both_ways, segmented=True)
# In a ring: n-1 steps of a rank's whole payload.
ALL_GATHER = Even(lambda ranks: ranks - 1, lambda ranks: (ranks - 1, 1))


class Gather(Collective):
    """All to rank 0 at once: n-1 payloads through its link."""

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        moved = root_bytes(payload, ranks, rank == 0)
        return (0, moved) if rank == 0 else (moved, 0)

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        moved = (ranks - 1) * payload * factor
        return Load(1, moved, 2 * moved / ranks, moved)


class Scatter(Gather):
    """From rank 0 to all at once: a gather the other way round."""

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        sent, received = super().moved(payload, element_bytes, ranks, rank)
        return received, sent


class Reduce(Collective):
    """A ring reduce-scatter whose parts go to rank 0, which says that it is ready for them when its ring has ended.

    gloo's ring leaves out the last two segments of a part alone, so that almost all of the payload goes round.
    """

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        return reduce_bytes(payload, ranks, rank, rank == 0)

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        payload *= factor
        sent, received = reduce_bytes(round(payload), ranks, 0, True)
        mean = 2 * ((ranks - 1) / ranks * payload) * (1 + 1 / ranks)
        segments = ranks * ring_segments(payload, ranks) - 2
        return Load(ranks - 1, received, mean, sent + received, segments, waits=2)


class Broadcast(Collective):
    """A binomial tree from rank 0, which has ceil(log2 n) children, its eldest child one fewer, and so on.

    Whoever has the payload sends it whole to all of its children at once, which share its link: L payloads pass rank
    0's, then L-1 its eldest child's, down to 1.
    """

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        return broadcast_bytes(payload, ranks, rank)

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        payload *= factor
        levels = (ranks - 1).bit_length()
        return Load(levels, levels * (levels + 1) / 2 * payload, 2 * ((ranks - 1) / ranks * payload), levels * payload)


def copied_by(payload: float, ranks: int) -> float:
    """Bytes that each of a host's ranks reads and writes to average `payload` bytes in memory that they share."""
    return (5 + 1 / ranks) * payload if ranks > 1 else 0.0


class SharedMemoryCollective(Collective):
    """Through memory that the ranks of one host share: nothing is sent. `shared_memory.py` says what is copied."""

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        return 0, 0

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        return Load(0, 0.0, 0.0, 0.0, copied_bytes=copied_by(payload, ranks))


GATHER, SCATTER, REDUCE, BROADCAST, IN_MEMORY = Gather(), Scatter(), Reduce(), Broadcast(), SharedMemoryCollective()
