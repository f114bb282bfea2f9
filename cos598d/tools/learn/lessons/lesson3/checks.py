"""Lesson 3: the mean on every rank, by one ring for each gradient."""

from cos598d.comm.gloo import all_reduce_bytes
from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import World
from cos598d.tools.learn.checking import Check, Checks
from cos598d.tools.learn.lessons.common import averages, bytes_of, record, tensorwise, traffic_claim, trainable


def _judge(world: World, rank: int, found: dict[str, int]) -> None:
    tensors, n = trainable(world), world.size
    right = sum(all_reduce_bytes(bytes_of(tensor), n) for tensor in tensors.values())
    calls = (
        f"rank {rank} made {number_of(found['calls'], 'call')} for {len(tensors)} gradients, expected {len(tensors)}"
    )
    world.require(found["calls"] == len(tensors), f"{calls}: one all-reduce for each", rank)
    for way in ("sent", "received"):
        words = f"rank {rank} {way} {found[way]} bytes on {n} ranks, expected 2(n-1)/n S = {right}"
        world.require(found[way] == right, f"{words}: each gradient goes round the ring of an all-reduce once", rank)


one_ring_each = traffic_claim(
    "one_ring_each", "One all-reduce for each gradient; every rank sends and receives 2(n-1)/n S bytes.", _judge
)

CHECKS = Checks((Check(averages, (2, 3)), Check(one_ring_each, (2, 4))), tensorwise, record)
