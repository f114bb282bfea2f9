"""torch's ZeroRedundancyOptimizer on torch's DDP: whole gradients, and optimizer state sharded over the ranks."""

import contextlib
import inspect
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from cos598d.records.conventions import PARAMETERS
from cos598d.sync.ddp import DDP


class TorchZero1(DDP):
    """Sharded optimizer state, by torch (after Rajbhandari et al., "ZeRO", SC 2020, section 5.1).

    1. DDP averages the gradients while backward runs. Every rank has all of them, and clips by their norm.
    2. Whole parameters are assigned to the ranks, the largest first, each to the rank with the least so far. Each rank
       steps its own, and holds the optimizer state of these only.
    3. Each rank broadcasts the parameters that it stepped, which `parameters_as_bucket_view` makes contiguous.

    Cost for S bytes of gradients and weights on n ranks: as for `ddp`, 2(n-1)/n S, and n broadcasts of S in total; in
    gloo's trees a rank forwards up to ceil(log2 n) S/n for each root. The textbook's (`zero1`) is a reduce-scatter and
    an all-gather, together 2(n-1)/n S. Memory: S of weights, 2S of gradients with DDP's buckets, and about 2S/n of
    AdamW's state. Choose it if only that state does not fit and you may use nothing but torch.

    Known wrong: a parameter larger than S/n makes shares uneven, and all ranks wait for the rank that has it.
    """

    keeps_optimizer_state = False

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        kind = type(optimizer)
        settings = {name: v for name, v in optimizer.defaults.items() if name in inspect.signature(kind).parameters}
        sharded = ZeroRedundancyOptimizer(
            [group for group in optimizer.param_groups if group["params"]],
            optimizer_class=kind,
            process_group=self.group,
            # A bucket gives its parameters another order in memory than DDP's buckets have, so channels_last stays out.
            parameters_as_bucket_view=all(p.is_contiguous() for _, p in self.parameters),
            **settings,
        )
        self._naming = contextlib.ExitStack()
        sharded.register_step_pre_hook(self._before_step)
        return sharded

    def _before_step(self, *_: Any) -> None:
        self._naming.enter_context(self.ledger.naming("stepped weights", PARAMETERS))

    def after_step(self) -> None:
        self._naming.close()

    def detach(self) -> None:
        for _, p in self.parameters:  # out of the buckets, each of which holds all parameters of one rank
            p.data = p.data.clone()
        super().detach()
