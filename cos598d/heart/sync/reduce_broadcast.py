"""One reduce to rank 0 and one broadcast for each gradient: the sum is computed on the way."""

import torch
import torch.distributed as dist

from cos598d.heart.sync.base import GradientSync


class ReduceBroadcast(GradientSync):
    """Averaging by reduce and broadcast, tensor by tensor, after backward.

    1. Reduce: the ranks add up n-th parts in a ring, and each sends its finished part to rank 0, which divides by n.
    2. Broadcast: rank 0 sends the average down a binomial tree, in which ranks that have it pass it on.

    Cost for P gradients of S bytes in all: 2P calls. Rank 0 sends (n-1)/n S + ceil(log2 n) S, and holds no copies.
    """

    def average(self, name: str, gradient: torch.Tensor) -> None:
        dist.reduce(gradient, self.peer(0), group=self.group)
        if self.rank == 0:
            gradient /= self.ranks
        dist.broadcast(gradient, self.peer(0), group=self.group)
