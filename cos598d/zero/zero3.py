"""ZeRO stage 3: every rank keeps the weights of its n-th alone, and gathers a layer's just before it computes."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from cos598d.errors import UserError
from cos598d.records.conventions import PARAMETERS, WHOLE_WEIGHTS
from cos598d.sync.base import GradientSync, Named
from cos598d.sync.codecs import End
from cos598d.zero.layers import by_layer, owners
from cos598d.zero.unit import Unit
from cos598d.zero.zero2 import Zero2


class Zero3(Zero2):
    """Stage 3, the weights sharded too (Rajbhandari et al., "ZeRO", SC 2020, section 5.3: P_os+g+p).

    1. A unit is a layer's parameters (`layers.owners`). Embeddings that are only looked up are a unit of their own.
       Rank r keeps part r. What belongs to no layer, or to several, is the model's own unit.
    2. Before a layer's forward its weights are gathered, and meanwhile the next layer's, in the order of
       registration. After it they are freed. The model's own stay from its forward to backward's end.
    3. When backward reaches a layer's output, its weights are gathered again, and meanwhile those of the layer before.
       Looked-up ones are not, since the gradient of a lookup does not depend on them. A rank whose backward leaves out
       a layer sends its part all the same, when it reaches the layer before.
    4. A unit's weights are freed with its last gradient, whose reduce-scatter starts, as in stage 2.

    Only a layer's own forward can read its weights; elsewhere they are NaN until `settle()`, and must not be changed. A
    copy of the model has what was there: copy it after `settle()`.
    Every rank must call the same layers in the same order, also in evaluation, except after `settle()`.

    Cost for weights of S bytes, E of them in such embeddings, and a micro-batches per step: every rank sends and
    receives a (n-1)/n (2S - E) of weights and a (n-1)/n S of gradients. Memory: S/n of weights and of gradients, with
    AdamW 2S/n of state, and within a step two layers and those of no layer. Choose it if weights do not fit and the
    links are fast.
    """

    takes = GradientSync.takes  # without buckets

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        self._stay = False  # all weights stay until the next forward of training
        self._waiting: dict[nn.Module, None] = {}  # for backward to reach them: layers, in the order of their forwards
        self._units: dict[Any, list[Unit]] = by_layer(model, self.buckets)
        self._units.setdefault(model, [])
        self._next = dict(pairwise(reversed(self._units)))  # units are in the order of backward
        for layer in self._units:
            self._handles.append(layer.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(layer.register_forward_hook(self._leave))
        for unit in self.buckets:
            unit.part = unit.part.clone()
        self._free(self.buckets)
        return call

    def plan(self, parameters: Sequence[Named]) -> list[list[Named]]:
        layer_of = owners(self.model)
        tables = [p for module in self.model.modules() if type(module) is nn.Embedding for p in module.parameters()]
        self._looked_up = {p for p in tables if layer_of[p] is not self.model}
        groups: dict[Any, list[Named]] = {}
        for name, p in reversed(parameters):
            groups.setdefault((layer_of[p], p.dtype, p in self._looked_up), []).append((name, p))
        # Those of no layer come last: backward reaches them after all layers.
        return [groups[key] for key in sorted(groups, key=lambda key: key[0] is self.model)]

    def check_places(self) -> None:
        self.wait_for(self.buckets)
        super().check_places()
        for unit in self.buckets if self._stay else ():  # the script may have changed them
            unit.part.copy_(unit.part_of(unit.weights))

    def start(self, unit: Any) -> End:
        self._free([unit])
        return super().start(unit)

    def finish(self) -> None:
        self._reach(None)
        super().finish()
        self._free(self.buckets)

    def after_step(self) -> None:
        """The parts are stepped. A layer's weights are gathered when it needs them."""
        self._stay = False
        self._free(self.buckets)

    def settle(self) -> None:
        super().settle()
        self.gather(self.buckets, WHOLE_WEIGHTS)
        self.wait_for(self.buckets)
        self._stay = True

    def gather(self, units: Iterable[Unit], purpose: str = PARAMETERS) -> None:
        """Start to gather those that are not here."""
        freed = [unit for unit in units if unit.is_freed]
        for unit in freed:
            unit.allocate()
        super().gather(freed, purpose)

    def _free(self, units: list[Unit]) -> None:
        if not self._stay:
            self.wait_for(units)
            for unit in units:
                if not unit.is_freed:
                    unit.free()

    def _of_backward(self, layer: Any) -> list[Unit]:
        """The units that the layer's backward reads."""
        return [unit for unit in self._units.get(layer, []) if unit.named[0][1] not in self._looked_up]

    def _reach(self, layer: nn.Module | None) -> None:
        """Send the parts of the layers after this one, or of all: backward has left them out on this rank."""
        while self._waiting and (last := self._waiting.popitem()[0]) is not layer:
            self.gather(self._of_backward(last))

    def _enter(self, layer: nn.Module, *_: Any) -> None:
        """A layer's forward is about to begin."""
        is_again = torch._C._current_graph_task_id() != -1  # a checkpointed layer, which backward computes again
        if layer is self.model and self._stay and torch.is_grad_enabled() and not is_again:
            self._stay = False
            self._free(self.buckets)
        own = self._units.get(layer, [])  # a copy of a layer has none
        self.gather([*own, *([] if is_again else self._units.get(self._next.get(layer), []))])
        self.wait_for(own)

    def _leave(self, layer: nn.Module, _: Any, output: Any) -> None:
        """A layer's forward has ended."""
        if torch._C._current_graph_task_id() != -1:
            return
        leaves = pytree.tree_leaves(output)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for tensor in found:
            tensor.register_hook(lambda _: self._come_back(layer))
        if found:
            self._waiting.pop(layer, None)
            self._waiting[layer] = None
        # What an object of an unknown kind holds may be read by backward without a hook: then the weights stay.
        is_known = all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves)
        if not torch.is_grad_enabled() or (layer is not self.model and is_known):
            self._free(self._units.get(layer, []))

    def _come_back(self, layer: nn.Module) -> None:
        """Backward has reached a layer's output."""
        if torch.is_grad_enabled():
            raise UserError(
                "this backward builds a graph of itself (create_graph), which reads weights where zero3 sees no layer. "
                "Choose zero1 or zero2."
            )
        if layer in self._waiting:
            self._reach(layer)
        own = self._of_backward(layer)
        self.gather([*own, *self._of_backward(next(reversed(self._waiting), None))])
        self.wait_for(own)
