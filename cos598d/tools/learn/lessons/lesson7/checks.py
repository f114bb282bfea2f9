"""Lesson 7: the mean in buckets of a size, of models that have frozen, tied, unused and large parameters."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.sync.base import GradientSync
from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, MakeSync, World
from cos598d.tools.check.comparison import Comparison
from cos598d.tools.check.toy import SMALL, seeded, toy_model
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.common import ALL_USED, averages, bytes_of, record
from cos598d.tools.learn.lessons.overlapped import (
    Chain,
    begins_during_backward,
    chain_inputs,
    golf_in_backward,
    one_order,
)

BUCKET_BYTES = 512  # some of the toy's tensors are larger, and some share a bucket with others
PLANS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "the first model": (lambda nonce: toy_model(nonce, ALL_USED), BUCKET_BYTES),
    "the chain": (lambda nonce: seeded(nonce, Chain), BUCKET_BYTES),
    "the chain in other buckets": (lambda nonce: seeded(nonce, Chain), 1000),
}


def _in_buckets(student: ModuleType) -> MakeSync:
    """A sync that makes the student's `Buckets(comm, model, bucket_bytes)`."""

    class InBuckets(GradientSync):
        def __init__(self, comm: Communicator, bucket_bytes: int = BUCKET_BYTES, **options: Any):
            super().__init__(comm, **options)
            self.bucket_bytes = bucket_bytes

        def attach(self, model: nn.Module) -> nn.Module:
            module = super().attach(model)
            self.buckets = student.Buckets(self.comm, model, self.bucket_bytes)
            return module

        def finish(self) -> None:
            self.buckets.finish()

    return InBuckets


@Claim
def calls_are_buckets(on: OnLesson) -> None:
    """All gradients are sent, in no more calls than the plan has buckets; each has one dtype, and a bucket's bytes."""
    for name, (make, bucket_bytes) in PLANS.items():
        model = make(on.nonce)
        sync, module = on.attached(model, bucket_bytes=bucket_bytes)
        ledger = on.fresh_ledger()
        if isinstance(model, Chain):
            module(chain_inputs(on.nonce, on.rank, 0)).backward()
        else:
            module(**on.batch(0))[0].backward()
        sync.finish()
        on.report(name, [[row.payload_bytes, row.dtype] for row in ledger.rows])


@calls_are_buckets.judgement
def _(world: World) -> None:
    for name, (make, bucket_bytes) in PLANS.items():
        tensors = [p for p in make(world.nonce).parameters() if p.requires_grad]
        for rank, rows in enumerate(world.reported(name, list)):
            _judge_calls(world, rank, [row for row in rows if _is_call(row)], tensors, bucket_bytes)
        if world.findings:
            return


def _judge_calls(
    world: World, rank: int, calls: Sequence[Sequence[Any]], tensors: Sequence[nn.Parameter], bucket_bytes: int
) -> None:
    right: Counter[str] = Counter()
    for tensor in tensors:
        right[dtype_name(tensor.dtype)] += bytes_of(tensor)
    found: Counter[str] = Counter()
    for size, dtype in calls:
        found[dtype] += size
    most, alone = _buckets(tensors, bucket_bytes), {bytes_of(tensor) for tensor in tensors}
    # What a file sends to agree on what was used is of another kind, and no bucket.
    sizes = [size for size, dtype in calls if dtype in right]
    made = f"rank {rank} makes {number_of(len(sizes), 'call')} for {len(tensors)} gradients"
    why = "one call for each bucket, not for each gradient" if len(sizes) == len(tensors) else "fill each bucket"
    world.require(len(sizes) <= most, f"{made} in buckets of {bucket_bytes} bytes, expected {most}: {why}", rank)
    for dtype, size in right.items():
        words = f"rank {rank} sends {found[dtype]} bytes of {dtype} in calls, and the gradients have {size} of it"
        why = "a bucket has one dtype" if found.total() >= right.total() else "send each gradient in one bucket"
        world.require(found[dtype] == size, f"{words}: {why}", rank)
    large = next((size for size in sizes if size > bucket_bytes and size not in alone), 0)
    words = f"rank {rank} sends {large} bytes of several gradients in one call, expected {bucket_bytes} at most"
    world.require(not large, f"{words}: open another bucket if the next gradient does not fit", rank)


def _is_call(row: Any) -> bool:
    return isinstance(row, list) and [type(each) for each in row] == [int, str]


def _buckets(tensors: Sequence[nn.Parameter], bucket_bytes: int) -> int:
    """How many buckets the page's plan has."""
    count, room, dtype = 0, 0, None
    for tensor in reversed(tensors):
        if bytes_of(tensor) > room or tensor.dtype != dtype:
            count, room, dtype = count + 1, bucket_bytes, tensor.dtype
        room -= bytes_of(tensor)
    return count


@Claim
def counts_unused_as_zero(on: OnLesson) -> None:
    """A parameter that only some ranks used has the mean with zeros for the others; frozen weights get no gradient."""
    model = on.model(SMALL)
    sync, module = on.attached(model)
    for step, users in enumerate(_users(on.world_size)):
        on.step(sync, module, model, _used(step, users), step, with_first_label=on.rank in users)


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
    "misplaced": "rank {rank} has the averages in the wrong gradients: cut the buffer in the order in which you filled "
    "it, and begin buckets in one order on all ranks",
    "missing": "rank {rank} did not use a parameter that other ranks used, and has no average of it: send zeros for "
    "it, and put the mean into its .grad",
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
    golf=golf_in_backward(bucket_bytes=1 << 17),
)
