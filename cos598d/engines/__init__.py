"""Other libraries' engines, one file each, behind the same door as our syncs.

An engine trains as one process does, and reports losses, seconds and bytes. It resumes from weights only.
"""

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
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
    """An engine that changes its model: from the first forward on it trains a copy, whose buffers are the model's.

    The model itself stays plain. It has no memory for weights from a forward until it is settled.
    """

    shards, keeps_optimizer_state = True, False
    engine: Any = None  # what to call in the model's place, once the copy is made
    _is_whole = True  # the model has its weights

    def attach(self, model: nn.Module) -> Callable:
        super().attach(model)
        self.parameters = []  # the library has its own hooks
        return self._forward

    def begin(self, copied: nn.Module) -> Any:
        """Give the library a copy of the model, which is whole. Return what to call in the model's place."""

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The copy's weights under the model's names. Each is valid until the next."""
        raise NotImplementedError

    def steps(self, copied: Any) -> None:
        """Make the optimizer step the copy's weights in place of the model's."""
        theirs = dict(copied.named_parameters())
        twins = {p: theirs[name] for name, p in self.model.named_parameters()}
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["params"] = [twins[p] for p in group["params"]]

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing yet: there is no copy before the first forward."""

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do: the model has its weights, and the copy will have them."""

    def settle(self) -> None:
        super().settle()
        if not self._is_whole:
            self._give_memory(is_whole=True)
            with torch.no_grad(), self.ledger.naming("whole weights", WHOLE_WEIGHTS):
                for name, whole in self.whole_weights():
                    self.model.get_parameter(name).copy_(whole.detach())

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: a run resumes from the weights."""
        return iter(())

    def detach(self) -> None:
        super().detach()
        self.engine = None

    def _forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self.engine is None:
            buffers = {id(buffer): buffer for buffer in self.model.buffers()}
            self._sizes = [(p, p.untyped_storage().nbytes()) for p in self.model.parameters()]
            self.engine = self.begin(copy.deepcopy(self.model, buffers))
        self.engine.train(self.model.training)
        self._give_memory(is_whole=False)
        with self.ledger.naming("a layer", PARAMETERS):
            return self.engine(*inputs, **keywords)

    def _give_memory(self, is_whole: bool) -> None:
        for p, size in self._sizes if is_whole != self._is_whole else ():
            p.untyped_storage().resize_(size if is_whole else 0)
        self._is_whole = is_whole
