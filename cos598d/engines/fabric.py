"""Lightning Fabric: torch's DDP, set up by another library."""

import logging
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from cos598d.engines import need
from cos598d.sync.base import GradientSync
from cos598d.sync.ddp import DDP


class Fabric(DDP):
    """Fabric's `setup_module` around the model (Lightning AI), with its DDP strategy.

    1. Fabric is told the ranks that have met, and starts none.
    2. It wraps the model in torch's DDP, which averages in buckets while backward runs.
    3. Clipping and the step are on whole averages, the same on every rank.

    Cost and memory: as for `ddp`, 2(n-1)/n S, and buckets of S. Choose it to keep your own loop and change strategies
    by a word; it uses torch's engines underneath.
    """

    takes = GradientSync.takes

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        need("lightning", "Lightning Fabric", "fabric")

    def attach(self, model: nn.Module) -> Callable:
        GradientSync.attach(self, model)
        for name in ("lightning.fabric", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        import lightning.fabric
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.fabric.strategies import DDPStrategy

        # Each rank counts as a host of one device.
        os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": str(self.rank)}
        fabric = lightning.fabric.Fabric(
            accelerator=self.device.type,
            devices=1 if self.device.type == "cpu" else [self.device.index or 0],
            num_nodes=self.ranks,
            # init_sync: it has just been done
            strategy=DDPStrategy(find_unused_parameters=self.options.find_unused_parameters, init_sync=False),
            plugins=[LightningEnvironment()],
        )
        fabric.launch()
        wrapped: Any = fabric.setup_module(model)
        self._ddp = wrapped._forward_module  # torch's
        return wrapped
