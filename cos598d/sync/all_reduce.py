"""Task 2(b): one all-reduce for each gradient, then a division by the number of ranks."""

import torch

from cos598d.sync.base import GradientSync
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step


class AllReduce(GradientSync):
    """Averaging by all-reduce, tensor by tensor, after backward.

    For each gradient, in the order of the model's parameters:
    1. All ranks sum it with a ring all-reduce. In n-1 steps every rank passes on and adds one n-th of the tensor
       (reduce-scatter). In n-1 more steps the finished parts go around (all-gather).
    2. Every rank divides by n.

    Cost for P gradients of S bytes in all: P calls; every rank sends and receives 2(n-1)/n S, for any number of ranks.
    No link is special, but each call waits for its 2(n-1) steps, and none starts before backward has ended. Choose it
    to understand DDP, or for a model with few, large tensors.
    """

    keeps_nothing = takes_sparse = True

    def average(self, name: str, gradient: torch.Tensor) -> None:
        self.comm.all_reduce(gradient, name)
        gradient /= self.comm.world_size

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        return [CollectiveCall(ALL_REDUCE, [tensor]) for tensor in step.tensors]
