"""Other libraries' engines, one file each, behind the same door as our syncs.

An engine trains as one process does, and reports losses, seconds and bytes. It resumes from weights only.
"""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cos598d.errors import UsageError
from cos598d.records.conventions import PARAMETERS, WHOLE_WEIGHTS
from cos598d.sync.base import GradientSync


def need(package: str, title: str, sync: str) -> None:
    """Raise UsageError unless `package` is installed."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--sync {sync} needs {title}, which is not installed. Run `make engines`.")


class EngineOfCopy(GradientSync):
    """An engine that changes its model: it trains a copy, whose buffers are the model's.

    The model itself stays plain. It has no memory for weights from the first forward until it is settled.
    """

    shards, keeps_optimizer_state = True, False
    engine: Any  # what to call in the model's place

    def attach(self, model: nn.Module) -> Callable:
        super().attach(model)
        self.parameters = []  # the library has its own hooks
        self.make_copy()
        return self._forward

    def make_copy(self) -> None:
        """Copy the model, which is whole."""
        self.copy = copy.deepcopy(self.model, {id(buffer): buffer for buffer in self.model.buffers()})
        self._sizes = [(p, p.untyped_storage().nbytes()) for p in self.model.parameters()]
        self._is_whole = True

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step this rank's pieces, unless the library has done it."""

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The copy's weights under the model's names. Each is valid until the next."""
        raise NotImplementedError

    def settle(self) -> None:
        super().settle()
        if not self._is_whole:
            for p, size in self._sizes:
                p.untyped_storage().resize_(size)
            with torch.no_grad(), self.ledger.naming("whole weights", WHOLE_WEIGHTS):
                for name, whole in self.whole_weights():
                    self.model.get_parameter(name).copy_(whole.detach())
            self._is_whole = True

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: a run resumes from the weights."""
        yield from ()

    def _forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self.copy.training != self.model.training:
            self.copy.train(self.model.training)
        for p, _ in self._sizes if self._is_whole else ():
            p.untyped_storage().resize_(0)
        self._is_whole = False
        with self.ledger.naming("a layer", PARAMETERS):
            return self.engine(*inputs, **keywords)
