"""Gradient syncs that keep the contract in unusual ways: tests that expect more than it says reject them."""

import torch

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync


class FromTheLast(AllReduce):
    """Averages tensor by tensor, from the last to the first."""

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        return super().gradients()[::-1]


class DividesFirst(AllReduce):
    """Divides each rank's gradient by n, and sums then: the last bits differ."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        gradient /= self.comm.world_size
        self.comm.all_reduce(gradient, name)


class NewGradients(AllReduce):
    """Puts each average into a tensor of its own, and that in the place of the gradient."""

    def finish(self) -> None:
        parameters = dict(self.parameters)
        for name, gradient in self.gradients():
            average = gradient.clone()
            self.average(name, average)
            parameters[name].grad = average


class ReduceScatterAllGather(GradientSync):
    """The two halves of an all-reduce, one after the other.

    1. Each gradient is cut into n parts of one length, zeros behind the last elements.
    2. Rank r receives the sum of all ranks' r-th parts, and divides it by n.
    3. All ranks gather the n averages.
    """

    def average(self, name: str, gradient: torch.Tensor) -> None:
        ranks, elements = self.comm.world_size, gradient.numel()
        parts = gradient.new_zeros(ranks, -(-elements // ranks))
        parts.view(-1)[:elements] = gradient.flatten()
        for root in range(ranks):
            self.comm.reduce(parts[root], name, root=root)
        averages, call = self.comm.all_gather(parts[self.comm.rank] / ranks, name)
        call.wait()
        gradient.copy_(torch.cat(averages)[:elements].view_as(gradient))
