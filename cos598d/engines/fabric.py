"""Lightning Fabric: torch's DDP, set up by another library."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from cos598d.engines import need
from cos598d.sync.base import GradientSync


class Fabric(GradientSync):
    """Fabric's `setup_module` around the model (Lightning AI), with its DDP strategy.

    1. Fabric is told the ranks that have met, and starts none.
    2. It wraps the model in torch's DDP, which averages in buckets while backward runs.
    3. Clipping and the step are on whole averages, the same on every rank.

    Cost and memory: as for `ddp`, 2(n-1)/n S, and buckets of S. Choose it to keep your own loop and change strategies
    by a word; it uses torch's engines underneath.
    """

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        need("lightning", "Lightning Fabric", "fabric")

    def attach(self, model: nn.Module) -> Callable:
        super().attach(model)
        for name in ("lightning.fabric", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        import lightning.fabric
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.fabric.strategies import DDPStrategy

        # Each rank counts as a host of one device.
        os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": str(self.rank)}
        self._fabric = lightning.fabric.Fabric(
            accelerator=self.device.type,
            devices=1 if self.device.type == "cpu" else [self.device.index or 0],
            num_nodes=self.ranks,
            # init_sync: it has just been done
            strategy=DDPStrategy(find_unused_parameters=self.options.find_unused_parameters, init_sync=False),
            plugins=[LightningEnvironment()],
        )
        self._fabric.launch()
        self._module: Any = self._fabric.setup_module(model)
        return self._module

    def begin_forward(self) -> None:
        """Nothing to do: torch's DDP sends rank 0's buffers itself."""

    def finish(self) -> None:
        """Nothing to do: the end of backward has waited."""

    def no_sync(self) -> AbstractContextManager[None]:
        return self._fabric.no_backward_sync(self._module)

    def detach(self) -> None:
        self._module._forward_module._remove_autograd_hooks()
        del self._module, self._fabric
        super().detach()
