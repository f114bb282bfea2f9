"""Lesson 4: the mean in every gradient, by one call for each dtype."""

import pytest

from cos598d.comm.gloo import all_reduce_bytes
from cos598d.tools.course.common import are_averages, average_steps, tensors


def all_at_once(module):
    """Averages by the student's function, all gradients together."""
    return lambda comm, gradients: module.average_all(comm, list(gradients.items()))


@pytest.mark.parametrize("n", [2, 3])
def test_averages(ranks, seed, n):
    """After your code every .grad is the mean of all ranks' gradients, on every rank, step after step."""
    are_averages(ranks(n, average_steps, seed, all_at_once), seed)


@pytest.mark.parametrize("n", [2, 4])
def test_one_call_a_dtype(ranks, seed, n):
    """One call for each dtype; every rank sends and receives 2(n-1)/n S bytes."""
    world, dtypes = ranks(n, average_steps, seed, all_at_once), {p.dtype for p in tensors()}
    right = sum(all_reduce_bytes(sum(p.nbytes for p in tensors(dtype)), n) for dtype in dtypes)
    for rank, found in enumerate(value["traffic"] for value in world.values):
        calls = (
            f"rank {rank} made {found['calls']} call{'' if found['calls'] == 1 else 's'} for {len(tensors())} gradients"
        )
        world.require(found["calls"] == len(dtypes), f"{calls}, expected {len(dtypes)}: one for each dtype", rank)
        words = f"rank {rank} sent {found['sent']} bytes on {n} ranks, expected 2(n-1)/n S = {right}"
        world.require(found["sent"] == right, words, rank)
