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
    """`nn.DataParallel` on g GPUs of one host, by threads of one process (torch's module of that name).

    1. Forward copies the weights from the first GPU to the others and cuts the batch into g pieces, equal but the last.
    2. Each GPU computes its piece; the losses come back to the first, weighted here by the pieces' examples.
    3. Backward runs on all, and adds the gradients up on the first GPU, where the optimizer steps.

    Cost for S bytes of weights, between the host's GPUs: the first sends (g-1) S of weights and receives (g-1) S of
    gradients in every forward and backward. Memory: on the first GPU weights, gradients and AdamW's state, 4 S; on
    each other S, and S of gradients. The ledger has what ranks send, and so nothing of it.
    Choose it never: `ddp` on as many ranks is faster, because its copies stay and no thread waits for another's Python.

    Without a GPU, or with one, it only calls the module: it is one process then, and measures nothing of its own.

    Known wrong: the loss of a batch whose examples weigh differently within the model, such as a loss that leaves some
    out, is not the mean of its pieces' means.
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
    """What `attach` gave, as the module that DataParallel wants."""

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
