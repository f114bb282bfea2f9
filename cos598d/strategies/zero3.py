"""ZeRO stage 3: every rank keeps only its n-th of the weights, and gathers a layer's just before it computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from cos598d.comm.ledger import dtype_name
from cos598d.records.kinds import TEXT, Fields, MapOf, expect
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.parts.sharded_formulas import held_by_shards, sent_by_layers
from cos598d.strategies.parts.units import Unit, by_layer, layers, looked_up, owners, read_in_backward
from cos598d.strategies.parts.weights import ShardedWeights
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.state import FullTensor, own_state_of
from cos598d.sync.buckets import MIB, Named


class Zero3(Sharded):
    """Optimizer state, gradients and weights sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5.3: P_os+g+p).

    1. A layer's weights are packed in a flat tensor that is split into n parts; rank r keeps part r. A parameter of
       more than `--bucket_mb`, or an embedding of more than one MiB, has a flat tensor to itself. Layers:
       `units.layers`.
    2. Before a layer's forward its weights are gathered: rank r sends part r to every other rank. While the layer
       computes, the next one's are being gathered (the order is learned in the first forward). After it they are freed.
    3. Before a layer's backward its weights are gathered again, and meanwhile those of the layer before it. Such an
       embedding's are not, since the gradient of a lookup does not depend on them.
    4. When its last gradient is ready, the weights are freed, and the gradients' reduce-scatter starts, as in `zero2`.
    5. Norm and step are as in `zero1`, but on the part that the rank keeps. Nothing is gathered until the next forward.
    Weights that several layers share, such as tied ones, and those of no layer are gathered before the model's
    forward and stay until backward has their gradients. Frozen ones stay whole on every rank.

    Only a layer's own forward can read its weights; elsewhere they are NaN. Every rank must call the same layers in the
    same order, equally often, also in evaluation, except after `settle` or in `whole`. Over gloo, ranks that do not
    would wait for each other forever: within seconds they detect it, and end with the layers' names
    (`DeadlockDetector`). Over nccl, whose messages have no tags, ranks mix up weights of layers of equal size: `finish`
    detects it before anything is stepped. Layers of different sizes are left to nccl's timeout.

    Cost for weights of S bytes, E of them in such embeddings, and a micro-batches per step: every rank sends and
    receives a (n-1)/n (2S - E) of weights and a (n-1)/n S of gradients: (n-1)/n (3S - E) without accumulation. Memory:
    S/n of weights and, with AdamW, 2S/n of state, a pool as in `zero2`, and up to 8(n-1) MiB of scratch; from backward
    to the step S/n of gradients. Within a step also the weights of two successive layers and those of no layer, the
    gradients of one layer, and the largest gradient in it once more (`held_by_shards`). Under bf16 and fp16, autocast
    saves a copy of the weights in half precision for backward: another S/2. Choose it if weights, gradients and state
    do not fit into one rank's memory and the links are fast.
    """

    uses = ("bucket_mb",)
    equal_layers = True
    shards = ("optimizer", "gradients", "parameters")

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._weights = ShardedWeights(self.comm)
        self._stay = False  # all weights stay gathered until the next forward of training
        self._after: dict[nn.Module, nn.Module] = {}  # the layer that was called next, the last time
        self._before: dict[nn.Module, nn.Module] = {}
        self._looked_up = looked_up(model)
        self._again: dict[nn.Module, list[Unit]] = {}  # the units that backward of its latest call will need
        self._latest: nn.Module | None = None
        self._calls: list[nn.Module] = []  # the calls of forward that backward has not passed yet
        self._went_back = False  # whether backward has run since the last forward
        module = super().attach(model, make_optimizer)
        found = by_layer(self._gradients.units).items()
        self._units = {model if layer is None else layer: units for layer, units in found}
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._before_model)]
        for layer in self._units:
            if layer is not model:
                self._handles.append(layer.register_forward_pre_hook(self._before_forward))
                self._handles.append(layer.register_forward_hook(self._after_forward, always_call=True))
        self._handles.append(model.register_forward_hook(self._after_model, always_call=True))
        return module

    def units_of(self, model: nn.Module, parameters: Sequence[Named], ranks: int) -> list[Unit]:
        """A unit of a layer's small weights per dtype, and one of each large weight. The last layer's come first and
        the model's own come last: backward reaches what several layers share after it has passed them."""
        owner, embeddings, units = owners(model), looked_up(model), list[Unit]()
        for name, layer in {**dict(reversed(layers(model))), "": None}.items():
            groups: dict[str, list[Named]] = {}
            for of, p in reversed(parameters):
                if owner[p] == name:
                    most = self.options.first_bucket_mb if p in embeddings else self.options.bucket_mb
                    is_alone = p.numel() * p.element_size() > most * MIB
                    key = of if is_alone else f"{name or 'the model'} {dtype_name(p.dtype)}"
                    groups.setdefault(key, []).append((of, p))
            for word, group in groups.items():
                units.append(Unit(word, group, ranks))
                units[-1].layer = layer
        return units

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        units = self.units_of(job.model, job.trainable, job.ranks)
        return held_by_shards(job, units, gathers=True, embeddings=looked_up(job.model))

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        units = self.units_of(job.model, job.trainable, job.ranks)
        return sent_by_layers(job, units, self.find_unused_parameters, looked_up(job.model))

    def hold(self, unit: Unit) -> torch.Tensor:
        return self._weights.take(unit)

    def finish(self) -> None:
        if not self.comm.messages_have_tags:
            self._weights.check_order()
        super().finish()

    def is_complete(self, unit: Unit) -> None:
        self._weights.free([unit])

    def stepped(self) -> None:
        self._stay = False
        self._weights.free_all()

    def weights_under_way(self) -> list[torch.Tensor]:
        return self._weights.gathered_tensors()

    def forget_step(self) -> None:
        self._calls = []
        super().forget_step()

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.collect()
        yield from ((name, p) for name, p in super().whole_weights() if not p.requires_grad)

    def put_weights(self, whole: FullTensor) -> None:
        self.stepped()
        if not self.model.get_parameter(whole.name).requires_grad:
            super().put_weights(whole)
        elif whole.name in self.held:
            held = self.held[whole.name]
            held.parameter.data.copy_(held.part_of(whole.tensor))

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As in the interface, and the order in which the layers are called."""
        facts, tensors = super().own_state()
        names = {layer: name for name, layer in self.model.named_modules()}
        learned = {"after": self._after, "before": self._before}
        return facts | {
            word: {names[layer]: names[other] for layer, other in calls.items()} for word, calls in learned.items()
        }, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_own_state(facts, tensors)
        with own_state_of(self.comm.rank):
            expect(facts, Fields({"after": MapOf(TEXT), "before": MapOf(TEXT)}))
            layers = {name: layer for name, layer in self.model.named_modules() if layer in self._units}
            self._after = {layers[name]: layers[other] for name, other in facts["after"].items()}
            self._before = {layers[name]: layers[other] for name, other in facts["before"].items()}

    @property
    def is_whole(self) -> bool:
        return self._stay

    def catch_up(self) -> None:
        while self._calls:
            call, layer = len(self._calls) - 1, self._calls[-1]
            self._before_backward(layer, call, self._again.get(layer, ()))
            self._leave_behind(call - 1)

    def settle(self) -> None:
        self._stay = True
        self._weights.gather_all()
        super().settle()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which every rank's model holds all current weights, under its plain names."""
        before = self._stay
        self.settle()
        try:
            yield
        finally:
            self._stay = before
            if not before:
                self._weights.free_all()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.settle()
        super().detach()

    def _before_model(self, model: nn.Module, _: Any) -> None:
        if self._stay and torch.is_grad_enabled():
            self.stepped()
        self._latest = model
        if self._went_back and not _is_in_backward():
            self._calls, self._went_back = [], False
        if not self._stay:
            self._bring(self._units[model], self._units_after(model))

    def _after_model(self, model: nn.Module, *_: Any) -> None:
        if not self._stay and not torch.is_grad_enabled():
            self._weights.free(self._units[model])
            self._calls = []  # no backward comes

    def _before_forward(self, layer: nn.Module, _: Any) -> None:
        if self._stay:
            return
        if _is_in_backward():  # a checkpointed layer is computed again; backward has passed the layers after it
            own = set(layer.parameters())
            shared = [unit for unit in self._units[self.model] if any(p in own for _, p in unit.parameters)]
            self._bring([*self._units[layer], *shared])  # a reentrant backward may have freed shared weights
            return
        if self._latest is not None:
            self._after[self._latest], self._before[layer] = layer, self._latest
        self._latest = layer
        self._calls.append(layer)
        self._bring(self._units[layer], self._units_after(layer))

    def _after_forward(self, layer: nn.Module, _: Any, output: Any) -> None:
        if self._stay or _is_in_backward():
            return
        call = len(self._calls) - 1
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        units = self._again[layer] = self._needed_again(self._units[layer], leaves)
        for leaf in leaves:
            leaf.register_hook(lambda _: self._before_backward(layer, call, units))
        self._weights.free(self._units[layer])

    def _needed_again(self, units: list[Unit], outputs: Sequence[torch.Tensor]) -> list[Unit]:
        """The units of a layer whose weights the backward from its outputs reads."""
        embeddings = {p for unit in units for _, p in unit.parameters if p in self._looked_up}
        if not embeddings:
            return units
        unread = embeddings - read_in_backward(outputs, embeddings)
        return [unit for unit in units if not unread.issuperset(p for _, p in unit.parameters)]

    def _before_backward(self, layer: nn.Module, call: int, units: Sequence[Unit]) -> None:
        self._leave_behind(call)
        previous = self._before.get(layer)
        upstream = self._again.get(previous, ()) if previous is not None else ()
        self._bring(units, [unit for unit in upstream if self._gradients.awaits(unit)])

    def _leave_behind(self, call: int) -> None:
        """Backward has reached this call of forward: layers that were only called later will get no more gradients.

        Autograd runs forward's operations in reverse order. So a rank that did not use some of a layer's weights starts
        their reduce-scatter at the same point as the others. They may wait for it there before they send what this rank
        waits for next.
        """
        self._went_back = True
        while len(self._calls) > call + 1:
            layer = self._calls.pop()
            if layer not in self._calls:
                self._gradients.expect_no_more(self._units[layer])

    def _units_after(self, layer: nn.Module) -> Sequence[Unit]:
        """The units of the layer that was called next, the last time; for the model itself, its first layer's."""
        following = self._after.get(layer)
        return self._units[following] if following is not None else ()

    def _bring(self, units: Sequence[Unit], ahead: Sequence[Unit] = ()) -> None:
        """Wait for these weights, and start to gather those needed next (`ahead`)."""
        self._weights.gather(units)
        self._weights.gather(ahead)
        self._weights.wait(units)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
