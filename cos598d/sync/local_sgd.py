"""Weights averaged every few steps instead of gradients in every step."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from cos598d.state import load_optimizer, optimizer_state
from cos598d.sync.base import GradientSync


class LocalSGD(GradientSync):
    """Each rank trains by itself and the ranks average their weights every H steps (Stich 2019, "Local SGD").

    1. In every step each rank steps by the gradient of its own share of the global batch, clipped by its own norm.
    2. After every H-th step (`--sync_every H`), and before the model is evaluated or saved, all ranks average their
       weights, in one buffer for each dtype, by a ring all-reduce. Each rank keeps its own optimizer state; a run that
       resumes with other ranks, or with another sync, uses rank 0's.
    3. Under fp16 all ranks must skip the same steps, as torch's ShardedGradScaler lets them.

    Parity: with H = 1, plain SGD and no clipping, the weights are those of averaged gradients, up to rounding. With
    Adam, clipping or H > 1 they are not. It is another algorithm then: compare its loss, not its weights.

    Cost for weights of S bytes: 1 call every H steps; every rank sends and receives 2(n-1)/n S / H per step on average.
    Choose it if links are so slow that a step must not wait for them.
    """

    takes = (*GradientSync.takes, "sync_every")
    steps = 0

    def finish(self) -> None:
        """Nothing is sent: each rank trains by itself until the next average."""

    def after_step(self) -> None:
        self.steps += 1
        self.replicas_equal = self.ranks == 1  # until the next average
        if self.steps % self.options.sync_every == 0:
            self.average_weights()

    def settle(self) -> None:
        if not self.replicas_equal:
            self.average_weights()
        super().settle()

    @torch.no_grad()
    def average_weights(self) -> None:
        """Give every rank the mean of all ranks' weights."""
        self.replicas_equal = True
        for dtype in dict.fromkeys(p.dtype for _, p in self.parameters):
            weights: list[torch.Tensor] = [p for _, p in self.parameters if p.dtype == dtype]
            flat = torch.cat([p.detach().flatten() for p in weights]).div_(self.ranks)
            with self.ledger.naming(f"weights of {str(dtype)[6:]}"):
                dist.all_reduce(flat, group=self.group)
            torch._foreach_copy_(weights, _unflatten_dense_tensors(flat, weights))

    def own_state(self) -> dict[str, torch.Tensor]:
        """The number of steps, and what this rank's optimizer remembers."""
        states = optimizer_state(self.optimizer, self.model) if self.optimizer else ()
        return {"steps": torch.tensor(self.steps)} | dict(states)

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.steps = int(state["steps"])
        if self.optimizer:
            load_optimizer(self.optimizer, self.model, state)
