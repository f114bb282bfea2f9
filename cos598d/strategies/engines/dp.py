"""torch's DataParallel: one process that copies the model to all of its GPUs in every step."""

from typing import Any

import torch
from torch import nn

from cos598d.errors import UsageError
from cos598d.records.conventions import BY_COUNTERS
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.replicated import Replicated
from cos598d.sync.none import NoSync


class DP(Replicated):
    """`nn.DataParallel` on g GPUs of one host, with threads of one process (torch's module of that name).

    1. Forward copies the weights from the first GPU to the others and splits the batch into g pieces, equal except the
       last.
    2. Each GPU computes its piece. The losses return to the first GPU, where they are weighted by the number of
       examples.
    3. Backward runs on all GPUs and adds the gradients up on the first, where the optimizer steps.

    Cost for S bytes of weights, between the host's GPUs: in every forward and backward the first GPU sends (g-1) S of
    weights and receives (g-1) S of gradients. Memory: weights, gradients and AdamW's state, 4 S, on the first GPU; S of
    weights and S of gradients on each other. The ledger counts what ranks send, so it has none of this. Never choose
    it: `ddp` on as many ranks is faster, because its copies stay and no thread waits for another's Python.

    With one GPU or none it only calls the module: it is one process then, and measures nothing of its own.

    Known wrong: if examples have different weights within the model, as in a loss that ignores some, the batch's loss
    is not the weighted mean of the pieces' means.
    """

    sync_kind = NoSync
    bytes_from = BY_COUNTERS

    @classmethod
    def check_config(cls, config: Any, world_size: int) -> None:
        """Raise UsageError for more ranks than one."""
        if world_size > 1:
            raise UsageError(
                f"--sync dp uses one process with all of its GPUs, not {world_size} ranks. "
                "Give --world_size 1, or choose --sync ddp."
            )

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        module = super().attach(model, make_optimizer)
        if self.sync.comm.device.type != "cuda" or torch.cuda.device_count() < 2:
            return module
        return _weighted(nn.DataParallel(_Called(module)))


class _Called(nn.Module):
    """The callable from `attach`, as the module that DataParallel needs."""

    def __init__(self, module: Module):
        super().__init__()
        self.module = module

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The mean loss of these examples, (1,)."""
        return self.module(**inputs)[0].reshape(1)


def _weighted(parallel: nn.DataParallel) -> Module:
    def forward(**inputs: torch.Tensor) -> tuple[torch.Tensor]:
        losses = parallel(**inputs)
        examples = torch.tensor([len(each) for each in next(iter(inputs.values())).chunk(len(parallel.device_ids))])
        return ((losses * examples.to(losses) / examples.sum()).sum(),)

    return forward
