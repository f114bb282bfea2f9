"""ZeRO by hand (Rajbhandari et al., "ZeRO", SC 2020): each rank keeps one n-th of the training, in three stages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.heart.state import of_parameter
from cos598d.heart.sync.base import GradientSync, Named
from cos598d.heart.sync.buckets import plan_buckets
from cos598d.heart.sync.options import BucketSizes
from cos598d.records.conventions import PARAMETERS, STATE


class Unit:
    """Some parameters of one dtype, side by side in a flat tensor that is padded and cut into n equal parts.

    weights: the flat tensor, of which the parameters are views. part: rank r's n-th of it. gradients: this rank's, in
    the same layout, while they are collected. shard: rank r's n-th of their average.
    """

    def __init__(self, name: str, named: Sequence[Named], rank: int, ranks: int):
        self.name, self.named, self.rank, self.ranks = name, list(named), rank, ranks
        self.sizes = [p.numel() for _, p in named]
        self.length = -(-sum(self.sizes) // ranks)
        self.weights = named[0][1].new_zeros(self.length * ranks)
        for view, (_, p) in zip(self.views(self.weights), self.named, strict=True):
            p.data = view.copy_(p.data)
        self.part = self.weights[rank * self.length : (rank + 1) * self.length]
        self.gradients: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.sums: tuple[torch.Tensor, Any] | None = None  # under way: what arrives, and its call
        self.gather: Any = None  # under way: the call that brings the weights
        self.is_whole = True  # the weights are here, or on their way

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat tensor, as views of their shapes."""
        padding = len(flat) - sum(self.sizes)
        parts = flat.split([*self.sizes, padding])
        return [part.view(p.shape) for part, (_, p) in zip(parts, self.named, strict=False)]

    def pieces(self) -> Iterator[tuple[str, nn.Parameter, slice]]:
        """What this rank's part has of each parameter: its name, the parameter, and the piece's place in the part."""
        first, begin = self.rank * self.length, 0
        for (name, p), size in zip(self.named, self.sizes, strict=True):
            low, high = max(begin, first), min(begin + size, first + self.length)
            if low < high:
                yield name, p, slice(low - first, high - first)
            begin += size


class Unread(torch.Tensor):
    """Stands in .grad for an average of which each rank has only its part. Whoever reads it is told what to do."""

    @staticmethod
    def __new__(cls, parameter: nn.Parameter) -> "Unread":
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise ValueError("this rank has only its part of the gradient. Clip by model.clip_grad_norm_(max_norm).")


class Zero1(GradientSync):
    """Stage 1, the optimizer's state sharded. Rank r steps part r of each unit.

    1. The parameters are packed into units of at most `bucket_mb`, in the reverse order of registration.
    2. When backward has computed a unit's last gradient, its reduce-scatter starts, while backward continues: rank r
       sends part k to rank k, and adds the n parts that arrive, in order of rank.
    3. The optimizer of rank r holds only the pieces of parameters in part r, and steps them in place.
    4. An all-gather of each unit: rank r sends part r of the weights to every other rank.

    Cost for weights of S bytes in B units: 2B calls. Every rank sends and receives (n-1)/n S of gradients and as much
    of weights: together what an all-reduce sends. Memory: S of weights, S of gradients and, with AdamW, 2S/n of state.
    """

    shards = True
    options_kind = BucketSizes
    options: BucketSizes

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        self.units = [Unit(name, named, self.rank, self.ranks) for name, named in self.plan(model)]
        self.unit_of = {p: unit for unit in self.units for _, p in unit.named}
        self._handles: list[Any] = []
        self._used: set[nn.Parameter] = set()  # by this rank, in this step
        self._begin()
        return call

    def plan(self, model: nn.Module) -> list[tuple[str, list[Named]]]:
        """The parameters of each unit, in the order in which their gradients are expected."""
        groups = plan_buckets(self.parameters, self.options.bucket_mb, self.options.first_bucket_mb)
        return [(f"bucket {k}", group) for k, group in enumerate(groups)]

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step this rank's pieces in place of whole parameters, in the same groups."""
        self.pieces = [(name, p, nn.Parameter(unit.part[place]), unit, place)
                       for unit in self.units for name, p, place in unit.pieces()]  # fmt: skip
        piece_of = {p: piece for _, p, piece, *_ in self.pieces}
        for group in optimizer.param_groups:
            group["params"] = [piece_of[p] for p in group["params"] if p in piece_of]
        optimizer.state.clear()

    def ready(self, parameter: nn.Parameter) -> None:
        unit = self.unit_of[parameter]
        self._take(unit, parameter)
        if not self._missing[unit]:
            self.complete(unit)
        self._start_what_is_full()

    def complete(self, unit: Unit) -> None:
        """All of the unit's gradients of this backward are here."""

    def finish(self) -> None:
        for unit in self.units:
            for p in list(self._missing[unit]):  # backward has left it out; an earlier micro-batch may have used it
                self._take(unit, p)
        self._start_what_is_full()
        for unit in self.units:
            arrived, call = unit.sums
            call.wait()
            total = arrived.view(self.ranks, -1).sum(dim=0).div_(self.ranks)
            unit.shard = total if unit.shard is None else unit.shard.add_(total)
            unit.sums = unit.gradients = None
        used = self.agree([p in self._used for _, p in self.parameters])
        is_used = {p: one for (_, p), one in zip(self.parameters, used, strict=True)}
        for _, p, piece, unit, place in self.pieces:
            piece.grad = unit.shard[place] if is_used[p] else None
            p.grad = Unread(p) if is_used[p] else None
        self._begin()

    def begin_forward(self) -> None:
        """Another backward of the step may be added: autograd needs room in .grad."""
        super().begin_forward()
        for _, p in self.parameters:
            p.grad = None if isinstance(p.grad, Unread) else p.grad

    def after_step(self) -> None:
        """The optimizer has stepped this rank's pieces: send them, and drop the gradients."""
        self._used.clear()
        for unit in self.units:
            unit.shard = None
        for _, p, piece, *_ in self.pieces:
            p.grad = piece.grad = None
        self.gather_stepped()

    def gather_stepped(self) -> None:
        for unit in self.units:
            self.bring(unit)

    def bring(self, unit: Unit, purpose: str = PARAMETERS) -> None:
        """Gather the unit's weights."""
        with self.ledger.naming(unit.name, purpose):
            dist.all_gather_into_tensor(unit.weights, unit.part.clone(), group=self.group)

    def whole_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's state, unit by unit, whole on every rank."""
        kinds = kinds_of(optimizer)
        for unit in self.units:
            mine = [(place, optimizer.state.get(piece, {})) for _, _, piece, of, place in self.pieces if of is unit]
            for kind, is_number in kinds.items():
                part, whole = unit.part.new_zeros(unit.length), unit.part.new_empty(unit.length * self.ranks)
                for place, state in mine:
                    part[place] = state.get(kind, 0)
                with self.ledger.naming(f"{kind} of {unit.name}", STATE):
                    dist.all_gather_into_tensor(whole, part, group=self.group)
                for view, (name, _) in zip(unit.views(whole), unit.named, strict=True):
                    yield f"{kind}/{name}", view.flatten()[0].cpu() if is_number else view

    def load_whole(self, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
        """Let this rank's optimizer remember its pieces of a whole state."""
        for unit in self.units:
            unit.part.copy_(unit.weights[self.rank * unit.length : (self.rank + 1) * unit.length])
        for name, p, piece, unit, place in self.pieces:
            begin = sum(unit.sizes[: [q is p for _, q in unit.named].index(True)])
            first = self.rank * unit.length + place.start - begin
            for kind, value in of_parameter(state, name):
                own = value.flatten()[first : first + piece.numel()] if value.dim() else value
                optimizer.state[piece][kind] = own.to(piece.device if value.dim() else "cpu", copy=True)
        self.gather_stepped()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for _, p in self.parameters:
            p.data, p.grad = p.data.clone(), None
        super().detach()

    def _begin(self) -> None:
        self._missing = {unit: {p for _, p in unit.named} for unit in self.units}
        self._next = 0  # units before it have started: every rank starts them in the same order

    def _take(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient, if it has one, into the unit's flat tensor."""
        self._missing[unit].discard(parameter)
        if parameter.grad is not None:
            if unit.gradients is None:
                unit.gradients = unit.part.new_zeros(unit.length * self.ranks)
            place = [p is parameter for _, p in unit.named].index(True)
            unit.views(unit.gradients)[place].copy_(parameter.grad)
            parameter.grad = None
            self._used.add(parameter)

    def _start_what_is_full(self) -> None:
        while self._next < len(self.units) and not self._missing[self.units[self._next]]:
            unit = self.units[self._next]
            sent = unit.part.new_zeros(unit.length * self.ranks) if unit.gradients is None else unit.gradients
            arriving = torch.empty_like(sent)
            with self.ledger.naming(unit.name):
                unit.sums = arriving, dist.all_to_all_single(arriving, sent, group=self.group, async_op=True)
            self._next += 1


class Zero2(Zero1):
    """Stage 2, gradients sharded too: every backward is reduced, also inside `no_sync`, and only part r is kept.

    Cost with a micro-batches per step: a (n-1)/n S of gradients and (n-1)/n S of weights. Memory: as stage 1, with S/n
    of gradients from backward to the step, and the units that are under way. Choose it if gradients do not fit.
    """

    every_backward = True


class Zero3(Zero2):
    """Stage 3, weights sharded too: a layer's are gathered just before it computes.

    1. A unit is a layer's parameters; what belongs to no layer, or to several, is one more. Rank r keeps part r.
    2. Before a layer's forward its weights are gathered, and freed after it; before its backward they are gathered
       again, and freed when its last gradient is there. Those of no layer stay from forward to backward's end.

    Only a layer's own forward can read its weights; elsewhere they are NaN. Every rank calls the same layers in the
    same order. Cost with a micro-batches per step: a (n-1)/n 2S of weights and a (n-1)/n S of gradients. Memory: S/n of
    weights, and within a step the largest layer. Choose it if weights do not fit and the links are fast.
    """

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        self._stay = False  # all weights stay until the next forward of training
        layer_units: dict[nn.Module, list[Unit]] = {}
        for unit, (_, named) in zip(self.units, self._planned, strict=True):
            layer_units.setdefault(self._layer_of.get(named[0][1], model), []).append(unit)
        for unit in self.units:
            unit.part = unit.part.clone()
        for layer, units in layer_units.items():
            self._handles.append(layer.register_forward_pre_hook(self._before(units, layer is model)))
            if layer is not model:
                self._handles.append(layer.register_forward_hook(self._after(units)))
                self._handles.append(layer.register_full_backward_pre_hook(lambda *_, units=units: self._fetch(units)))
        self._free(self.units)
        return call

    def plan(self, model: nn.Module) -> list[tuple[str, list[Named]]]:
        self._layer_of = owners(model)
        groups: dict[tuple, list[Named]] = {}
        for name, p in reversed(self.parameters):
            groups.setdefault((self._layer_of.get(p), p.dtype), []).append((name, p))
        # Those of no layer come last: backward reaches them after all layers.
        ordered = sorted(groups.items(), key=lambda group: group[0][0] is None)
        self._planned = [(f"layer of {named[-1][0]}", named) for _, named in ordered]
        return self._planned

    def complete(self, unit: Unit) -> None:
        if not self._stay:
            self._free([unit])

    def finish(self) -> None:
        super().finish()
        self._free(self.units)

    def gather_stepped(self) -> None:
        """Nothing: a layer's weights are gathered when it needs them."""
        self._stay = False
        self._free(self.units)

    def bring(self, unit: Unit, purpose: str = PARAMETERS) -> None:
        if not unit.is_whole:
            unit.weights.untyped_storage().resize_(unit.weights.nbytes)
            super().bring(unit, purpose)
            for view, (_, p) in zip(unit.views(unit.weights), unit.named, strict=True):
                p.data = view
            unit.is_whole = True

    def settle(self) -> None:
        super().settle()
        self._stay = True
        self._fetch(self.units)

    def _fetch(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.bring(unit)

    def _free(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.is_whole:
                for _, p in unit.named:
                    p.data = p.new_full((), torch.nan).expand(p.shape)
                # The storage object stays: what autograd has saved of it is valid again when it is gathered.
                unit.weights.untyped_storage().resize_(0)
                unit.is_whole = False

    def _before(self, units: Sequence[Unit], is_model: bool) -> Callable:
        def fetch(*_: Any) -> None:
            if is_model and self._stay and torch.is_grad_enabled():
                self._stay = False
                self._free(self.units)
            self._fetch(units)

        return fetch

    def _after(self, units: Sequence[Unit]) -> Callable:
        def free(*_: Any) -> None:
            in_backward = torch._C._current_graph_task_id() != -1  # a checkpointed layer that is computed again
            if not self._stay and not in_backward:
                self._free(units)

        return free


def owners(model: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """The one layer that has each parameter: a member of the model's outermost lists, or a child next to them."""
    users: dict[nn.Parameter, list[nn.Module]] = {}

    def walk(module: nn.Module, in_list: bool) -> None:
        has_lists = any(isinstance(part, nn.ModuleList | nn.Sequential) for part in module.modules())
        if module is not model and (in_list or not has_lists):
            for p in module.parameters():
                users.setdefault(p, []).append(module)
            return
        for child in module.children():
            walk(child, isinstance(module, nn.ModuleList | nn.Sequential))

    walk(model, False)
    return {p: layers[0] for p, layers in users.items() if len(layers) == 1}


def kinds_of(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """The kinds of state that the optimizer keeps, found by one step of a probe; whether each is a number."""
    probe = nn.Parameter(torch.zeros(2))
    probe.grad = torch.ones(2)
    words = {word: value for word, value in optimizer.param_groups[0].items() if word in optimizer.defaults}
    copy = type(optimizer)([{"params": [probe], **words}])
    copy.step()
    return {kind: value.dim() == 0 for kind, value in copy.state[probe].items() if value is not None}
