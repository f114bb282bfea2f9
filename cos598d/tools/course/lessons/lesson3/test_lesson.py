"""Lesson 3: the mean on every rank, by one ring for each gradient."""

import pytest

from cos598d.comm.gloo import all_reduce_bytes
from cos598d.tools.course.common import are_averages, average_steps, tensors


def tensorwise(module):
    """Averages by the student's function, gradient by gradient."""

    def average(comm, gradients):
        for name, gradient in gradients.items():
            module.average(comm, gradient, name)

    return average


@pytest.mark.parametrize("n", [2, 3])
def test_averages(ranks, seed, n):
    """After your code every .grad is the mean of all ranks' gradients, on every rank, step after step."""
    are_averages(ranks(n, average_steps, seed, tensorwise), seed)


@pytest.mark.parametrize("n", [2, 4])
def test_one_ring_each(ranks, seed, n):
    """One all-reduce for each gradient; every rank sends and receives 2(n-1)/n S bytes."""
    world, count = ranks(n, average_steps, seed, tensorwise), len(tensors())
    right = sum(all_reduce_bytes(p.nbytes, n) for p in tensors())
    for rank, found in enumerate(value["traffic"] for value in world.values):
        calls = f"rank {rank} made {found['calls']} call{'' if found['calls'] == 1 else 's'} for {count} gradients"
        world.require(found["calls"] == count, f"{calls}, expected {count}: one all-reduce for each", rank)
        for way in ("sent", "received"):
            words = f"rank {rank} {way} {found[way]} bytes on {n} ranks, expected 2(n-1)/n S = {right}"
            world.require(
                found[way] == right, f"{words}: each gradient goes round the ring of an all-reduce once", rank
            )
