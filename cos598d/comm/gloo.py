"""What a rank sends and receives in gloo's collectives, for a payload of S bytes among n ranks.

Seen on the wire:

    all-reduce   ring: reduce-scatter, then all-gather   every rank sends and receives 2(n-1)/n S
    broadcast    binomial tree from the root             the root sends ceil(log2 n) S, every other rank receives S
    gather       straight to the root                    the root receives (n-1) S, every other rank sends S
    scatter      straight from the root                  the root sends (n-1) S, every other rank receives S
    reduce       ring reduce-scatter, then to the root   all send S but the root, which receives 2(n-1)/n S; more
                                                         for tensors of over 2n MiB, see `reduce_bytes`
    all-gather   ring                                    every rank sends and receives (n-1) S
"""

import math

_SEGMENT_BYTES = 1 << 20  # gloo's


def bytes_moved(op: str, payload: int, ranks: int, rank: int, root: int = 0, is_ideal: bool = False) -> tuple[int, int]:
    """Bytes that `rank` sends and receives in a collective `op`, named as torch.distributed's function is.

    `payload` is this rank's own part in bytes, in a reduce-scatter and an all-to-all the parts for all ranks together.
    gloo's reduce-scatter is the ring of its all-reduce; one that `is_ideal`, as other backends' are, sends half.
    """
    if ranks == 1 or op == "barrier":
        return 0, 0
    if op == "broadcast":
        return broadcast_bytes(payload, ranks, (rank - root) % ranks)
    if op == "reduce":
        return reduce_bytes(payload, ranks, rank, rank == root)
    if op in ("gather", "scatter"):
        moved = (ranks - 1) * payload if rank == root else payload
        return (moved, 0) if (op == "scatter") == (rank == root) else (0, moved)
    if op in ("send", "recv"):
        return (payload, 0) if op == "send" else (0, payload)
    if op == "all_gather":
        return ((ranks - 1) * payload,) * 2
    if op == "all_to_all" or (op == "reduce_scatter" and is_ideal):
        return (round((ranks - 1) * payload / ranks),) * 2
    return (all_reduce_bytes(payload, ranks),) * 2


def all_reduce_bytes(payload: int, ranks: int) -> int:
    """Bytes that each rank sends (and receives) in a ring all-reduce of `payload` bytes: 2(n-1)/n S."""
    return round(2 * (ranks - 1) * payload / ranks)


def ring_segments(payload: float, ranks: int) -> int:
    """Segments in which gloo's rings move a rank's n-th part of `payload` bytes: of at most 1 MiB, at least two.

    Two are under way at a time, one received while the other is added up (gloo/allreduce.cc).
    """
    return max(math.ceil(payload / (_SEGMENT_BYTES * ranks)), 2)


def broadcast_bytes(payload: int, ranks: int, distance: int) -> tuple[int, int]:
    """Bytes sent and received in a binomial-tree broadcast by the rank `distance` places after the root."""
    children = sum(1 for bit in range(ranks.bit_length()) if distance < 1 << bit and distance + (1 << bit) < ranks)
    return children * payload, 0 if distance == 0 else payload


def reduce_bytes(payload: int, ranks: int, rank: int, is_root: bool) -> tuple[int, int]:
    """Bytes sent and received in gloo's reduce: a ring reduce-scatter, then the other ranks' parts go to the root.

    Up to 2n MiB that is (n-1)/n S in the ring and S/n to the root. A larger tensor goes round in segments of 1 MiB, of
    which gloo leaves out only the last two of a rank's own part, instead of all of it: S less 2 MiB.
    """
    if ranks == 1:
        return 0, 0
    segment = min(_SEGMENT_BYTES, -(-payload // (2 * ranks)))
    of_a_part = ring_segments(payload, ranks)

    def held(first: int, count: int) -> int:
        return min(payload, (first + count) * segment) - min(payload, first * segment)

    def ring(member: int) -> int:
        return payload - held((member % ranks + 1) * of_a_part - 2, 2)

    parts = [held(member * of_a_part, of_a_part) for member in range(ranks)]
    if is_root:
        return ring(rank), ring(rank + 1) + sum(parts) - parts[rank]
    return ring(rank) + parts[rank], ring(rank + 1)
