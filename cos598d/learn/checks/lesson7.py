"""Lesson 7: the mean in buckets of a size, of models that have frozen, tied, unused and large parameters."""

from types import ModuleType
from typing import Any

import torch
from torch import nn

from cos598d.check.claims.base import Claim, MakeSync, World
from cos598d.check.comparison import Comparison
from cos598d.check.toy import SMALL
from cos598d.comm.ledger import GRADIENTS, dtype_name
from cos598d.learn.checking import Check, Checks, OnLesson
from cos598d.learn.checks.common import ALL_USED, averages, bytes_of, record, trainable
from cos598d.learn.checks.overlapped import begins_during_backward, one_order
from cos598d.sync.base import GradientSync

BUCKET_BYTES = 512  # some of the toy's tensors are larger, and some share a bucket with others


def _in_buckets(student: ModuleType) -> MakeSync:
    """A sync that makes the student's `Buckets(comm, model, bucket_bytes)`."""

    class InBuckets(GradientSync):
        def attach(self, model: nn.Module) -> nn.Module:
            module = super().attach(model)
            self.buckets = student.Buckets(self.comm, model, BUCKET_BYTES)
            return module

        def finish(self) -> None:
            self.buckets.finish()

    return InBuckets


@Claim
def calls_are_buckets(on: OnLesson) -> None:
    """A step makes no more calls than the plan has buckets; none is larger than a bucket but for one large tensor."""
    model = on.model(ALL_USED)
    sync, module = on.attached(model)
    ledger = on.fresh_ledger()
    module(**on.batch(0))[0].backward()
    sync.finish()
    on.report("calls", [[row.payload_bytes, row.dtype] for row in ledger.rows if row.purpose == GRADIENTS])


@calls_are_buckets.judgement
def _(world: World) -> None:
    tensors = trainable(world)
    dtypes = {dtype_name(tensor.dtype) for tensor in tensors.values()}
    alone = {bytes_of(tensor) for tensor in tensors.values()}
    most = _buckets(list(tensors.values()))
    for rank, rows in enumerate(world.reported("calls", list)):
        # What a file sends to agree on what was used is of another kind, and no bucket.
        sizes = [size for size, dtype in filter(_is_call, rows) if dtype in dtypes]
        words = f"rank {rank} makes {len(sizes)} calls for {len(tensors)} gradients in buckets of {BUCKET_BYTES} bytes"
        why = "one call for each bucket, not for each gradient" if len(sizes) == len(tensors) else "fill each bucket"
        world.require(len(sizes) <= most, f"{words}, expected {most}: {why}", rank)
        large = next((size for size in sizes if size > BUCKET_BYTES and size not in alone), 0)
        words = f"rank {rank} sends {large} bytes of several gradients in one call, expected {BUCKET_BYTES} at most"
        world.require(not large, f"{words}: open another bucket where the next does not fit", rank)


def _is_call(row: Any) -> bool:
    return isinstance(row, list) and [type(each) for each in row] == [int, str]


def _buckets(tensors: list[nn.Parameter]) -> int:
    """How many buckets the page's plan has."""
    count, room, dtype = 0, 0, None
    for tensor in reversed(tensors):
        if bytes_of(tensor) > room or tensor.dtype != dtype:
            count, room, dtype = count + 1, BUCKET_BYTES, tensor.dtype
        room -= bytes_of(tensor)
    return count


@Claim
def counts_unused_as_zero(on: OnLesson) -> None:
    """A parameter that only some ranks used has the mean with zeros for the others; frozen weights get no gradient."""
    model = on.model(SMALL)
    sync, module = on.attached(model)
    for step, users in enumerate(_users(on.world_size)):
        module(**on.batch(step, on.rank in users))[0].backward()
        sync.finish()
        on.hand_in_gradients(_used(step, users), model)
        model.zero_grad(set_to_none=True)


@counts_unused_as_zero.judgement
def _(world: World) -> None:
    parameters = dict(world.model(SMALL).named_parameters())
    for step, users in enumerate(_users(world.size)):
        local = world.local([step], users)
        found = [
            {name: _none_if_zero(tensor, local.mean[name], parameters[name]) for name, tensor in each.items()}
            for each in world.handed_in(_used(step, users), parameters)
        ]
        for rank, each in enumerate(found):
            frozen = [n for n, p in parameters.items() if not p.requires_grad and each[n] is not None]
            world.require(not frozen, f"rank {rank} has a gradient of {(frozen or [''])[0]}, which is frozen", rank)
        world.compare(Comparison("", step, local, found, local.mean), _used(step, users))


def _none_if_zero(
    found: torch.Tensor | None, right: torch.Tensor | None, parameter: nn.Parameter
) -> torch.Tensor | None:
    """Zeros for None where no rank used the parameter: both are taken."""
    is_free = right is None and parameter.requires_grad
    return None if is_free and found is not None and not found.any() else found


def _users(world_size: int) -> tuple[set[int], ...]:
    return {0}, {world_size - 1}, set()


def _used(step: int, users: set[int]) -> str:
    return f"step {step}, `sometimes` used on ranks {sorted(users)}"


_OWN = {
    "scaled": "rank {rank}'s gradient is the average times {factor:.4g}: divide once, by n, when the sum is there",
    "misplaced": "the averages stand in the wrong gradients on rank {rank}: cut the buffer as it was put together, and "
    "begin buckets in one order on all ranks",
    "missing": "rank {rank} did not use a parameter, other ranks did, and it is left without their average: put zeros "
    "in its place, and the mean into its .grad",
}
CHECKS = Checks(
    (
        Check(averages, (2, 3), _OWN),
        Check(counts_unused_as_zero, (2, 3), _OWN),
        Check(one_order, (3,), _OWN),
        Check(calls_are_buckets, (2,)),
        Check(begins_during_backward, (2,)),
    ),
    _in_buckets,
    record,
)
