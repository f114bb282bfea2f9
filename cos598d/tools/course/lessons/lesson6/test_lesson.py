"""Lesson 6: the mean by calls that begin while backward runs, in one order on every rank."""

import pytest

from cos598d.tools.course.common import are_averages, average_steps
from cos598d.tools.course.overlapped import begins_during_backward, keeps_one_order, overlapped_steps

WORDS = {
    "scaled": "rank {rank}'s gradient is the average times {factor:.4g}: divide once, by n, when the sum is there",
    "misplaced": "rank {rank} has the averages in the wrong gradients: ranks match calls only by their order, so begin "
    "them in one order on all ranks",
}


def by_hooks(module):
    """Makes the student's `Averager(comm, parameters)` of a model's trainable parameters."""

    def make(comm, model):
        return module.Averager(comm, [(name, p) for name, p in model.named_parameters() if p.requires_grad])

    return make


@pytest.mark.parametrize("n", [2])
def test_averages(ranks, seed, n):
    """After finish() every .grad is the mean of all ranks' gradients, on every rank, step after step."""
    are_averages(ranks(n, average_steps, seed, by_hooks, True), seed, WORDS)


@pytest.mark.parametrize("n", [2, 3])
def test_one_order(ranks, seed, n):
    """If gradients arrive in another order on each rank, calls still come in one order, and the means are right."""
    keeps_one_order(ranks(n, overlapped_steps, seed, by_hooks, "branches"), seed, WORDS)


@pytest.mark.parametrize("n", [2])
def test_begins_during_backward(ranks, seed, n):
    """Each call begins soon after its gradients are there, while backward runs; none is waited for before finish()."""
    begins_during_backward(ranks(n, overlapped_steps, seed, by_hooks, "chain"), seed)
