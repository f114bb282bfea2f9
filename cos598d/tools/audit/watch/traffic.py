"""The operators by which torch communicates: what each is called, what travels, and the bytes by formula."""

from typing import NamedTuple

from cos598d.comm.gloo import all_reduce_bytes, broadcast_bytes, reduce_bytes, root_bytes
from cos598d.tools.audit.contents import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    RECEIVE,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)


class Operator(NamedTuple):
    """An operator of the dispatcher's: its `op`, and the places of its arguments. `root` is None where there is none.

    `payload` is the argument whose tensors are this rank's part, `group` the process group.
    """

    op: str
    payload: int
    group: int
    root: int | None = None


OPERATORS = {
    "allreduce_": Operator(ALL_REDUCE, 0, 1),
    "allreduce_coalesced_": Operator(ALL_REDUCE, 0, 1),
    "broadcast_": Operator(BROADCAST, 0, 1, 2),
    "reduce_": Operator(REDUCE, 0, 1, 3),
    "allgather_": Operator(ALL_GATHER, 1, 2),
    "_allgather_base_": Operator(ALL_GATHER, 1, 2),
    "allgather_coalesced_": Operator(ALL_GATHER, 1, 2),
    "allgather_into_tensor_coalesced_": Operator(ALL_GATHER, 1, 2),
    "reduce_scatter_": Operator(REDUCE_SCATTER, 1, 2),
    "_reduce_scatter_base_": Operator(REDUCE_SCATTER, 1, 2),
    "reduce_scatter_tensor_coalesced_": Operator(REDUCE_SCATTER, 1, 2),
    "gather_": Operator(GATHER, 1, 2, 3),
    "scatter_": Operator(SCATTER, 0, 2, 3),
    "alltoall_": Operator(ALL_TO_ALL, 1, 2),
    "alltoall_base_": Operator(ALL_TO_ALL, 1, 2),
    "barrier": Operator(BARRIER, 0, 1),
    "monitored_barrier_": Operator(BARRIER, 0, 1),
    "send": Operator(SEND, 0, 1),
    "recv_": Operator(RECEIVE, 0, 1),
    "recv_any_source_": Operator(RECEIVE, 0, 1),
}


def moved(op: str, payload: int, ranks: int, rank: int, root: int) -> tuple[int, int]:
    """Bytes that `rank` of `ranks` sends and receives in a call of `payload` bytes, by gloo's algorithms.

    `payload` is this rank's own part, in a reduce-scatter and an all-to-all the parts for all ranks.
    """
    if ranks <= 1 or op == BARRIER:
        return 0, 0
    both = {
        ALL_REDUCE: all_reduce_bytes(payload, ranks),
        REDUCE_SCATTER: all_reduce_bytes(payload, ranks),
        ALL_GATHER: (ranks - 1) * payload,
        ALL_TO_ALL: round((ranks - 1) / ranks * payload),
    }
    if op in both:
        return both[op], both[op]
    if op == BROADCAST:
        return broadcast_bytes(payload, ranks, (rank - root) % ranks)
    if op == REDUCE:
        return reduce_bytes(payload, ranks, rank, rank == root)
    if op in (GATHER, SCATTER):
        found = root_bytes(payload, ranks, rank == root)
        sends = (op == SCATTER) == (rank == root)
        return (found, 0) if sends else (0, found)
    return (payload, 0) if op == SEND else (0, payload)
