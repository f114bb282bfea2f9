"""Weights averaged every few steps instead of gradients in every step."""

import torch
import torch.distributed as dist

from cos598d.heart.sync.base import GradientSync


class LocalSGD(GradientSync):
    """Each rank trains by itself and the ranks average their weights every H steps (Stich 2019, "Local SGD").

    1. In every step each rank steps by the gradient of its own share, clipped by its own norm.
    2. After every H-th step (`sync_every`), and before the model is evaluated or saved, all ranks average their weights
       in one buffer, by a ring all-reduce. Each keeps its own optimizer state; a checkpoint has rank 0's.

    Cost for weights of S bytes: 1 call every H steps; every rank sends and receives 2(n-1)/n S / H per step on average.
    With H = 1 and plain SGD the weights are those of averaged gradients; else it is another algorithm.
    """

    replicas_equal, steps = True, 0

    def finish(self) -> None:
        """Nothing is sent."""

    def after_step(self) -> None:
        self.steps += 1
        self.replicas_equal = False
        if self.steps % self.options.sync_every == 0:
            self._average()

    def settle(self) -> None:
        if not self.replicas_equal:
            self._average()
        super().settle()

    @torch.no_grad()
    def _average(self) -> None:
        flat = torch.cat([p.flatten() for _, p in self.parameters])
        with self.ledger.naming("weights"):
            dist.all_reduce(flat, group=self.group)
        for part, (_, p) in zip(flat.split([p.numel() for _, p in self.parameters]), self.parameters, strict=True):
            p.copy_(part.view_as(p) / self.ranks)
        self.replicas_equal = True
