"""Lesson 7: the mean in buckets of a size, of models that have frozen, tied, unused and large parameters."""

from collections import Counter

import pytest

from cos598d.tools.course.common import SHAPE, are_averages, average_steps
from cos598d.tools.course.overlapped import (
    Chain,
    begins_during_backward,
    chain_loss,
    keeps_one_order,
    overlapped_steps,
)
from cos598d.tools.exam.explain import explain, mean_of
from cos598d.tools.exam.models import SMALL, gradients_of, local_batch, own_gradients, seeded, toy_model

BUCKET_BYTES = 512  # some of the toy's tensors are larger, and some share a bucket with others
OTHER_BYTES = 1000
PLANS = {"the first model": BUCKET_BYTES, "the chain": BUCKET_BYTES, "the chain in other buckets": OTHER_BYTES}
WORDS = {
    "scaled": "rank {rank}'s gradient is the average times {factor:.4g}: divide once, by n, when the sum is there",
    "misplaced": "rank {rank} has the averages in the wrong gradients: cut the buffer in the order in which you filled "
    "it, and begin buckets in one order on all ranks",
    "missing": "rank {rank} did not use a parameter that other ranks used, and has no average of it: send zeros for "
    "it, and put the mean into its .grad",
}


def in_buckets(module):
    """Makes the student's `Buckets(comm, model, bucket_bytes)`."""
    return lambda comm, model: module.Buckets(comm, model, BUCKET_BYTES)


@pytest.mark.parametrize("n", [2, 3])
def test_averages(ranks, seed, n):
    """After finish() every .grad is the mean of all ranks' gradients, on every rank, step after step."""
    are_averages(ranks(n, average_steps, seed, in_buckets, True), seed, WORDS)


def users_of(n):
    return {0}, {n - 1}, set()


def unused_steps(comm, module, seed):
    """Steps in which only the first rank uses the layer `sometimes`, only the last, and none."""
    model, found = toy_model(seed, SMALL), []
    buckets = in_buckets(module)(comm, model)
    for step, users in enumerate(users_of(comm.world_size)):
        model(**local_batch(comm.rank, step, comm.rank in users, seed))[0].backward()
        buckets.finish()
        found.append(gradients_of(model))
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_counts_unused_as_zero(ranks, seed, n):
    """A parameter that only some ranks used has the mean with zeros for the others; frozen weights get no gradient."""
    world, trains = ranks(n, unused_steps, seed), {}
    for name, p in toy_model(seed, SMALL).named_parameters():
        trains[name] = p.requires_grad
    for step, users in enumerate(users_of(n)):
        own = [own_gradients(seed, rank, step, SMALL, rank in users) for rank in range(n)]
        right, found = mean_of(own), []
        for rank, value in enumerate(world.values):
            frozen = [name for name, gradient in value[step].items() if gradient is not None and not trains[name]]
            words = f"rank {rank} has a gradient of {(frozen or [''])[0]}, which is frozen"
            world.require(not frozen, words, rank)
            found.append({name: taken(gradient, right[name]) for name, gradient in value[step].items()})
        wrong = explain(found, own, words=WORDS)
        if wrong:
            rank, told, detail = wrong
            world.fail(told, rank, detail)


def taken(gradient, right):
    """None for zeros where no rank used the parameter: both are taken."""
    return None if right is None and gradient is not None and not gradient.any() else gradient


@pytest.mark.parametrize("n", [3])
def test_one_order(ranks, seed, n):
    """If gradients arrive in another order on each rank, calls still come in one order, and the means are right."""
    keeps_one_order(ranks(n, overlapped_steps, seed, in_buckets, "branches"), seed, WORDS)


def model_of(plan, seed):
    return toy_model(seed, SHAPE) if plan == "the first model" else seeded(seed, Chain)


def planned_calls(comm, module, seed):
    """Of one step of each plan: where its calls begin in the trace, and where they end."""
    found = []
    for plan, size in PLANS.items():
        model = model_of(plan, seed)
        buckets, begun = module.Buckets(comm, model, size), len(comm.rows)
        if plan == "the first model":
            model(**local_batch(comm.rank, 0, True, seed))[0].backward()
        else:
            chain_loss(model, seed, comm.rank, 0).backward()
        buckets.finish()
        found.append([begun, len(comm.rows)])
    return found


@pytest.mark.parametrize("n", [2])
def test_calls_are_buckets(ranks, seed, n):
    """All gradients are sent, in no more calls than the plan has buckets; each has one dtype, and a bucket's bytes."""
    world = ranks(n, planned_calls, seed)
    for place, (plan, size) in enumerate(PLANS.items()):
        tensors = [p for p in model_of(plan, seed).parameters() if p.requires_grad]
        for rank, value in enumerate(world.values):
            begun, ended = value[place]
            judge_calls(world, rank, world.traces[rank].calls[begun:ended], tensors, size)


def judge_calls(world, rank, calls, tensors, bucket_bytes):
    """Fail unless these calls are the buckets of the plan."""
    right, found = Counter(), Counter()
    for tensor in tensors:
        right[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    for call in calls:
        found[call.dtype] += call.bytes
    most, alone = buckets_of(tensors, bucket_bytes), {tensor.nbytes for tensor in tensors}
    # What a file sends to agree on what was used is of another kind, and no bucket.
    sizes = [call.bytes for call in calls if call.dtype in right]
    made = f"rank {rank} makes {len(sizes)} call{'' if len(sizes) == 1 else 's'} for {len(tensors)} gradients"
    why = "one call for each bucket, not for each gradient" if len(sizes) == len(tensors) else "fill each bucket"
    words = f"{made} in buckets of {bucket_bytes} bytes, expected {most}: {why}"
    world.require(len(sizes) <= most, words, rank)
    for dtype, size in right.items():
        words = f"rank {rank} sends {found[dtype]} bytes of {dtype} in calls, and the gradients have {size} of it"
        why = "a bucket has one dtype" if found.total() >= right.total() else "send each gradient in one bucket"
        world.require(found[dtype] == size, f"{words}: {why}", rank)
    large = next((size for size in sizes if size > bucket_bytes and size not in alone), 0)
    words = f"rank {rank} sends {large} bytes of several gradients in one call, expected {bucket_bytes} at most"
    world.require(not large, f"{words}: open another bucket if the next gradient does not fit", rank)


def buckets_of(tensors, bucket_bytes):
    """How many buckets the page's plan has."""
    count, room, dtype = 0, 0, None
    for tensor in reversed(tensors):
        if tensor.nbytes > room or tensor.dtype != dtype:
            count, room, dtype = count + 1, bucket_bytes, tensor.dtype
        room -= tensor.nbytes
    return count


@pytest.mark.parametrize("n", [2])
def test_begins_during_backward(ranks, seed, n):
    """Each call begins soon after its gradients are there, while backward runs; none is waited for before finish()."""
    begins_during_backward(ranks(n, overlapped_steps, seed, in_buckets, "chain"), seed)
