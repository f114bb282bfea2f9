"""Task 2(a): rank 0 gathers each gradient, averages it and scatters the average."""

import torch
import torch.distributed as dist

from cos598d.sync.base import GradientSync
from cos598d.sync.messages import in_reach


class GatherScatter(GradientSync):
    """Averaging through one rank, tensor by tensor, after backward.

    For each gradient, in the order of the model's parameters:
    1. Every rank sends its gradient to rank 0 (gather).
    2. Rank 0 averages the n gradients.
    3. Rank 0 sends the average to every rank (scatter), which replaces its own gradient.

    Cost for P gradients of S bytes in all: 2P calls. Rank 0 receives and sends (n-1) S; every other rank sends and
    receives S. Rank 0's link carries (n-1) times the others' traffic, and all ranks wait for it. Rank 0 holds n copies
    of the largest gradient. Choose it to see why all-reduce was invented.
    """

    def average(self, name: str, gradient: torch.Tensor) -> None:
        with in_reach(self, gradient) as own:
            copies = [torch.empty_like(own) for _ in range(self.ranks)] if self.rank == 0 else None
            dist.gather(own, copies, dst=self.peer(0), group=self.group)
            averages = None
            if copies:
                mean = torch.zeros_like(own)
                for copy in copies:
                    mean += copy / self.ranks
                averages = [mean] * self.ranks
            dist.scatter(own, averages, src=self.peer(0), group=self.group)
