"""Lesson 2: the mean on every rank, and the bytes of a gather and a scatter of each gradient."""

import pytest

from cos598d.tools.course.common import are_averages, average_steps, tensors
from cos598d.tools.course.lessons.lesson3.test_lesson import tensorwise


@pytest.mark.parametrize("n", [2, 3, 4])
def test_averages(ranks, seed, n):
    """After your code every .grad is the mean of all ranks' gradients, on every rank, step after step."""
    are_averages(ranks(n, average_steps, seed, tensorwise), seed)


@pytest.mark.parametrize("n", [2, 4])
def test_moves_through_rank_0(ranks, seed, n):
    """Rank 0 sends and receives (n-1) S bytes, every other rank S."""
    world, size = ranks(n, average_steps, seed, tensorwise), sum(p.nbytes for p in tensors())
    for rank, value in enumerate(world.values):
        right, formula = ((n - 1) * size, "(n-1) S") if rank == 0 else (size, "S")
        for way in ("sent", "received"):
            found = value["traffic"][way]
            why = "each gradient is gathered once and its mean scattered once"
            if rank == 0 and way == "sent" and found < right:
                why = "every other rank gets the mean straight from rank 0, by a scatter; other calls take other paths"
            words = f"rank {rank} {way} {found} bytes for {size} bytes of gradients on {n} ranks, expected {formula} = "
            world.require(found == right, f"{words}{right}: {why}", rank)
