"""One reduce to rank 0 and one broadcast for each gradient: the sum is computed on the way."""

import torch
import torch.distributed as dist

from cos598d.sync.base import GradientSync


class ReduceBroadcast(GradientSync):
    """Averaging by reduce and broadcast, tensor by tensor, after backward.

    For each gradient, in the order of the model's parameters:
    1. Every rank divides its gradient by n.
    2. Reduce: the ranks add up n-th parts in a ring, and each sends its finished part to rank 0.
    3. Broadcast: rank 0 sends the average down a binomial tree, in which ranks that have it pass it on.

    Cost for P gradients of S bytes in all: 2P calls. Rank 0 receives 2(n-1)/n S and sends (n-1)/n S + ceil(log2 n) S,
    and holds no copies. No rank adds up more than the others, but every call still waits for rank 0. Choose it to see
    what a tree and a ring gain over `gather_scatter`.
    """

    def average(self, name: str, gradient: torch.Tensor) -> None:
        gradient /= self.ranks
        dist.reduce(gradient, self.peer(0), group=self.group)
        dist.broadcast(gradient, self.peer(0), group=self.group)
