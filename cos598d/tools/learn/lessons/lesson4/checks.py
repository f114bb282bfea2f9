"""Lesson 4: the mean in every gradient, by one call for each dtype."""

from types import ModuleType

from cos598d.comm.gloo import all_reduce_bytes
from cos598d.sync.base import GradientSync
from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import MakeSync, World
from cos598d.tools.learn.checking import Check, Checks
from cos598d.tools.learn.lessons.common import averages, bytes_of, record, traffic_claim, trainable


def _all_at_once(student: ModuleType) -> MakeSync:
    """A sync that calls the student's `average_all(comm, gradients)` once a step."""

    class AllAtOnce(GradientSync):
        def finish(self) -> None:
            student.average_all(self.comm, self.gradients())

    return AllAtOnce


def _judge(world: World, rank: int, found: dict[str, int]) -> None:
    tensors, n = trainable(world), world.size
    groups: dict = {}
    for tensor in tensors.values():
        groups[tensor.dtype] = groups.get(tensor.dtype, 0) + bytes_of(tensor)
    names = " and ".join(str(dtype)[6:] for dtype in groups)
    calls = f"rank {rank} made {number_of(found['calls'], 'call')} for {len(tensors)} gradients, expected {len(groups)}"
    world.require(found["calls"] == len(groups), f"{calls}: one for each dtype ({names})", rank)
    right = sum(all_reduce_bytes(size, n) for size in groups.values())
    why = "a buffer of mixed dtypes has the widest of them" if found["sent"] > right else "send all of each gradient"
    words = f"rank {rank} sent {found['sent']} bytes on {n} ranks, expected 2(n-1)/n S = {right}: {why}"
    world.require(found["sent"] == right, words, rank)


one_call_a_dtype = traffic_claim(
    "one_call_a_dtype", "One call for each dtype; every rank sends and receives 2(n-1)/n S bytes.", _judge
)

CHECKS = Checks((Check(averages, (2, 3)), Check(one_call_a_dtype, (2, 4))), _all_at_once, record)
