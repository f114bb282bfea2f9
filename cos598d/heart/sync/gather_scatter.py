"""Task 2(a): rank 0 gathers each gradient, averages it and scatters the average."""

import torch
import torch.distributed as dist

from cos598d.heart.sync.base import GradientSync


class GatherScatter(GradientSync):
    """Averaging through one rank, tensor by tensor, after backward.

    1. Every rank sends its gradient to rank 0 (gather), which averages the n gradients.
    2. Rank 0 sends the average to every rank (scatter).

    Cost for P gradients of S bytes in all: 2P calls. Rank 0 receives and sends (n-1) S; every other rank sends and
    receives S. Rank 0's link carries (n-1) times the others' traffic. Choose it to see why all-reduce was invented.
    """

    def average(self, name: str, gradient: torch.Tensor) -> None:
        copies = [torch.empty_like(gradient) for _ in range(self.ranks)] if self.rank == 0 else None
        dist.gather(gradient, copies, dst=self.peer(0), group=self.group)
        averages = [sum(copies) / self.ranks] * self.ranks if copies else None
        dist.scatter(gradient, averages, src=self.peer(0), group=self.group)
