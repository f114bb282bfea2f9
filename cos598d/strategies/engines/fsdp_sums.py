"""Our reduce-scatter with the interface that FSDP2 needs."""

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin, ReduceScatter

from cos598d.comm.exchange import ReduceScatters


class ReduceScatterByMessages(DefaultAllocMixin, ReduceScatter):
    """Sums a layer's gradients by messages. They send (n-1)/n of them; gloo's own reduce-scatter sends twice that."""

    def __init__(self, sums: ReduceScatters, ranks: int):
        self._sums, self._ranks = sums, ranks

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Put the sum of every rank's own part of `input_tensor` into `output_tensor`, or their mean."""
        lengths = [output_tensor.numel()] * self._ranks
        self._sums.start("gradients of a layer", input_tensor.view(-1), lengths, output_tensor.view(-1))
        self._sums.drain()
        if op == torch.distributed.ReduceOp.AVG:
            output_tensor /= self._ranks
