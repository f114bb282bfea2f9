"""ZeRO stage 1: every rank keeps the optimizer state of one n-th of the weights, and steps only those."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cos598d.comm.exchange import WeightGather
from cos598d.errors import UserError
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.parts.sharded_formulas import held_by_shards, sent_by_shards
from cos598d.strategies.parts.units import Unit, layers, owners
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.state import FullTensor
from cos598d.sync.buckets import Named, plan_buckets
from cos598d.sync.options import SyncOptions


def bucket_units(model: nn.Module, parameters: Sequence[Named], options: SyncOptions, ranks: int) -> list[Unit]:
    """Buckets of the model's parameters, each to be split into as many parts as there are ranks."""
    layer_of = owners(model).__getitem__
    groups = plan_buckets(parameters, options.bucket_mb, options.first_bucket_mb, layer_of)
    return [Unit(f"bucket {place}", group, ranks) for place, group in enumerate(groups)]


class Zero1(Sharded):
    """The optimizer's state sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5.1: P_os).

    1. The parameters are assigned to buckets in the reverse order of registration, as in `bucketed`. But a bucket of at
       least one MiB ends with its layer. So no layer's gradients wait for the next layer's, and no layer's forward for
       another's weights. A bucket's weights are packed in one flat tensor, and so are its gradients. Both are split
       into n parts; part r belongs to rank r.
    2. When backward has computed a bucket's last gradient, its reduce-scatter starts while backward continues. Rank r
       sends part k to rank k, and adds the n-1 copies of part r that it receives to its own, in order of rank.
    3. The sum of the squares of all parts gives the global gradient's norm: one all-reduce of one number.
    4. The optimizer of rank r holds only the pieces of parameters in part r, and steps them in place.
    5. An all-gather for each bucket, the first layers' first: rank r sends part r of the weights to every other rank.
       It overlaps with whatever comes next; a layer waits for its weights just before its next forward. So only a
       layer's forward may read its weights before `settle`.

    Cost for weights of S bytes in B buckets: 2B calls. Every rank sends and receives (n-1)/n S of gradients and as much
    of weights, together 2(n-1)/n S, as an all-reduce does; with clipping also one all-reduce of 8 bytes. Memory: S of
    weights, S of gradients and, with AdamW, 2S/n of state instead of 2S. In addition up to 8(n-1) MiB of scratch, and
    within a step the largest gradient once more (`held_by_shards`). If a parameter is a bucket by itself, its gradient
    is freed when it is reduced, and one n-th of it is kept apart until the step. The step takes one n-th of the time.
    Choose it wherever `bucketed` or `ddp` would do: it sends no more bytes.
    """

    keeps_gradients = True
    uses: tuple[str, ...] = ("bucket_mb",)
    shards: tuple[str, ...] = ("optimizer",)

    def units_of(self, model: nn.Module, parameters: Sequence[Named], ranks: int) -> list[Unit]:
        return bucket_units(model, parameters, self.options, ranks)

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        return held_by_shards(job, self.units_of(job.model, job.trainable, job.ranks), self.keeps_gradients)

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        reductions = 1 if self.keeps_gradients else job.passes
        units = self.units_of(job.model, job.trainable, job.ranks)
        return sent_by_shards(job, units, self.find_unused_parameters, reductions)

    def hold(self, unit: Unit) -> torch.Tensor:
        weights = unit.empty(unit.elements)
        for view, (_, p) in zip(unit.views(weights), unit.parameters, strict=True):
            p.data = view.copy_(p.data)
        self._gathers[unit] = self.make_gather(unit, weights)
        return unit.parts(weights)[self.comm.rank]

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._gathers: dict[Unit, WeightGather] = {}
        self._under_way: dict[Unit, WeightGather] = {}  # of those units
        module = super().attach(model, make_optimizer)
        unit_of = {p: unit for unit in self._gathers for _, p in unit.parameters}
        in_layers: set[nn.Parameter] = set()
        self._handles: list[RemovableHandle] = []
        for _, layer in layers(model):
            own = [p for p in layer.parameters() if p in unit_of]
            in_layers.update(own)
            self._wait_before(layer, [unit_of[p] for p in own])
        self._wait_before(model, [unit for p, unit in unit_of.items() if p not in in_layers])
        return module

    def finish(self) -> None:
        # The optimizer may change values that are still being sent to ranks whose layers have not asked for them.
        late = list(self._under_way)
        self._wait(late)
        super().finish()
        for unit in late:
            for name, p in unit.parameters:
                if self._gradients.is_used_here(p):
                    raise UserError(
                        f"{name} was read before its layer's forward, while its new values were still arriving. Read "
                        f"weights in the forward of the module that holds them, and call that module."
                    )

    def stepped(self) -> None:
        # Buckets are in the order of backward: the next forward needs the last one first.
        self._under_way = {unit: self._gathers[unit].start() for unit in reversed(self._gathers)}

    def wait_for_weights(self) -> None:
        self._wait(list(self._under_way))

    def make_gather(self, unit: Unit, weights: torch.Tensor) -> WeightGather:
        """The object that gathers the unit's weights, (its elements,), after each step."""
        return WeightGather(self.comm, unit.name, weights, unit.lengths, unit.weights_tag)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.wait_for_weights()
        return super().whole_weights()

    def put_weights(self, whole: FullTensor) -> None:
        self.wait_for_weights()
        super().put_weights(whole)

    def whole(self) -> AbstractContextManager[None]:
        self.wait_for_weights()
        return super().whole()

    def settle(self) -> None:
        self.wait_for_weights()
        super().settle()

    def detach(self) -> None:
        self.wait_for_weights()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._gathers.clear()
        super().detach()

    def _wait_before(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Make `module` wait for these weights before its forward."""
        needed = list(dict.fromkeys(units))
        if needed:
            self._handles.append(module.register_forward_pre_hook(lambda *_: self._wait(needed)))

    def _wait(self, units: Sequence[Unit]) -> None:
        for unit in units if self._under_way else ():
            gather = self._under_way.pop(unit, None)
            if gather is not None:
                gather.wait()
