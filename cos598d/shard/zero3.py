"""ZeRO stage 3: no rank keeps more than its n-th of the weights, and gathers a layer's just before it computes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from cos598d.shard.exchange import Gather
from cos598d.shard.sharded import Sharded
from cos598d.shard.units import Unit, layers, owners
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.sync.buckets import MIB, Named


class Zero3(Sharded):
    """Optimizer state, gradients and weights sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5.3: P_os+g+p).

    1. A layer's weights lie side by side in a flat tensor that is cut into n parts, of which rank r keeps part r. A
       parameter of more than `--bucket_mb` has a flat tensor to itself. Layers: `units.layers`.
    2. Before a layer's forward its weights are gathered: rank r sends part r to every other rank. While the layer
       computes, the next one's are on their way (the order is learned in the first forward). After it they are freed.
    3. Before a layer's backward its weights are gathered again, those of the layer before it meanwhile.
    4. When its last gradient is there the weights are freed, and the gradients' reduce-scatter starts, as in `zero2`.
    5. Norm and step: as in `zero1`, but on the part that the rank keeps. Nothing is gathered until the next forward.
    Weights that several layers share, such as tied ones, and those of no layer are gathered before the model's forward
    and stay until backward has their gradients. Frozen ones stay whole on every rank.

    Freed weights read as NaN. The storage under them keeps its place at a size of 0, so that what autograd has saved
    of it is right again when it is gathered. Every rank calls the same layers in the same order, the same number of
    times, in evaluation too, but for what happens after `settle` or in `whole`.

    Cost for weights of S bytes and a micro-batches a step: every rank sends and receives 2a (n-1)/n S of weights and
    a (n-1)/n S of gradients: 3(n-1)/n S without accumulation. Memory: S/n of weights, S/n of gradients and, with
    AdamW, 2S/n of state; within a step two layers' weights and the gradients under way, and up to 8(n-1) MiB of
    scratch. Under bf16 and fp16 autocast saves a copy of the weights in half precision for backward: another S/2.
    Choose it where weights, gradients and state do not fit into one rank's memory and the links are fast.
    """

    uses = ("bucket_mb",)
    equal_passes = True

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._layer_units: dict[nn.Module, list[Unit]] = {model: []}
        self._flats: dict[Unit, torch.Tensor] = {}
        self._views: dict[Unit, list[torch.Tensor]] = {}
        self._shards: dict[Unit, torch.Tensor] = {}
        self._gathers: dict[Unit, Gather] = {}  # of which the flat tensor has memory
        self._stay = False  # all weights, until the next forward of training
        self._after: dict[nn.Module, nn.Module] = {}  # the layer that was called next, the last time
        self._before: dict[nn.Module, nn.Module] = {}
        self._latest: nn.Module | None = None
        module = super().attach(model, make_optimizer)
        self._handles = [model.register_forward_pre_hook(self._before_model)]
        for layer in self._layer_units:
            if layer is not model:
                self._handles.append(layer.register_forward_pre_hook(self._before_forward))
                self._handles.append(layer.register_forward_hook(self._after_forward, always_call=True))
        self._handles.append(model.register_forward_hook(self._after_model, always_call=True))
        return module

    def make_units(self, parameters: Sequence[Named]) -> list[Unit]:
        owner = owners(self._model)
        units: list[Unit] = []
        for name, layer in [*reversed(layers(self._model)), ("", self._model)]:
            if name == "" and units and layer in self._layer_units and self._layer_units[layer]:
                break
            mine: dict[Any, list[Named]] = {}
            for named in reversed(parameters):
                p = named[1]
                if owner[p] == name:
                    is_large = p.numel() * p.element_size() > self.options.bucket_mb * MIB
                    mine.setdefault(named[0] if is_large else p.dtype, []).append(named)
            for key, group in mine.items():
                words = [name or "the model", key if isinstance(key, str) else str(key)[6:]]
                units.append(Unit(" ".join(words), group, self.comm.world_size))
                self._layer_units.setdefault(layer, []).append(units[-1])
        return units

    def hold(self, unit: Unit) -> torch.Tensor:
        self._lay(unit)
        for view, (_, p) in zip(self._views[unit], unit.parameters, strict=True):
            view.copy_(p.data)
        self._shards[unit] = unit.parts(self._flats[unit])[self.comm.rank].clone()
        self._drop(unit)
        return self._shards[unit]

    def is_complete(self, unit: Unit) -> None:
        self._free([unit])

    def stepped(self) -> None:
        self._stay = False
        self._free(list(self._gathers))

    def settle(self) -> None:
        self._stay = True
        self._gather(self._flats)
        self._wait(self._flats)
        super().settle()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which every rank's model holds all weights as they are now, under its plain names."""
        before = self._stay
        self.settle()
        try:
            yield
        finally:
            self._stay = before
            if not before:
                self._free(list(self._gathers))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.settle()
        super().detach()

    def _before_model(self, model: nn.Module, _: Any) -> None:
        if self._stay and torch.is_grad_enabled():
            self.stepped()
        self._latest = None
        if not self._stay:
            self._gather(self._layer_units[model])
            self._wait(self._layer_units[model])

    def _after_model(self, model: nn.Module, *_: Any) -> None:
        if not self._stay and not torch.is_grad_enabled():
            self._free(self._layer_units[model])

    def _before_forward(self, layer: nn.Module, _: Any) -> None:
        if self._stay:
            return
        if self._latest is not None:
            self._after[self._latest], self._before[layer] = layer, self._latest
        self._latest = layer
        self._gather(self._layer_units[layer])
        following = self._after.get(layer)
        if following is not None:
            self._gather(self._layer_units[following])
        self._wait(self._layer_units[layer])

    def _after_forward(self, layer: nn.Module, _: Any, output: Any) -> None:
        if self._stay:
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._before_backward(layer))
        if torch._C._current_graph_task_id() == -1:  # else it is computed again inside backward, which goes on with it
            self._free(self._layer_units[layer])

    def _before_backward(self, layer: nn.Module) -> None:
        self._gather(self._layer_units[layer])
        previous = self._before.get(layer)
        if previous is not None:
            self._gather([unit for unit in self._layer_units[previous] if self._gradients.awaits(unit)])
        self._wait(self._layer_units[layer])

    def _gather(self, units: Iterable[Unit]) -> None:
        """Start to gather these units' weights, those that are not here or on their way."""
        for unit in units:
            if unit not in self._gathers:
                flat = self._flats[unit]
                flat.untyped_storage().resize_(flat.nbytes)
                unit.parts(flat)[self.comm.rank].copy_(self._shards[unit])
                self._gathers[unit] = Gather(self.comm, unit, flat)

    def _wait(self, units: Iterable[Unit]) -> None:
        """Block until the weights are there, and put them in their places."""
        for unit in units:
            self._gathers[unit].wait()
            for view, (_, p) in zip(self._views[unit], unit.parameters, strict=True):
                p.data = view

    def _free(self, units: Iterable[Unit]) -> None:
        for unit in units:
            gather = self._gathers.pop(unit, None)
            if gather is not None:
                gather.wait()
                self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        for _, p in unit.parameters:
            p.data = torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)
        if not self._flats[unit].untyped_storage().resizable():  # somebody holds it as a numpy array
            self._lay(unit)
        self._flats[unit].untyped_storage().resize_(0)

    def _lay(self, unit: Unit) -> None:
        flat = self._flats[unit] = unit.empty(unit.elements)
        self._views[unit] = unit.views(flat)
