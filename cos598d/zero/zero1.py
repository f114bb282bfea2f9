"""ZeRO stage 1: every rank keeps the optimizer's state of one n-th of the weights, and steps only those."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT, PARAMETERS
from cos598d.sync.base import GradientSync, Named
from cos598d.sync.buckets import plan_buckets
from cos598d.sync.hooks import weakly
from cos598d.sync.options import BucketSizes
from cos598d.zero.collectives import add_up, start_all_gather, start_reduce_scatter
from cos598d.zero.layers import by_layer, refuse_max_norm
from cos598d.zero.shards import Shards
from cos598d.zero.unit import Unit
from cos598d.zero.unread import Unread


@dataclass(frozen=True)
class ZeroOptions(BucketSizes):
    """gather_in_forward: stepped weights travel during the next forward. Then only a layer's forward may read them."""

    gather_in_forward: bool = False


class Zero1(GradientSync):
    """Stage 1, the optimizer's state sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5.1: P_os).

    1. The parameters are packed into units of at most `bucket_mb`, in the reverse order of registration. A unit's
       weights lie side by side in a flat tensor, and so do its gradients. Both are cut into n parts.
    2. When backward has computed a unit's last gradient, its reduce-scatter starts, while backward continues: rank r
       sends part k to rank k, and averages the n parts that arrive, in order of rank. Every rank starts the units in
       the same order.
    3. The optimizer of rank r holds only the pieces of parameters in part r, and steps them in place.
    4. An all-gather of each unit: rank r sends part r of the weights to every other rank. When `optimizer.step()`
       returns, the weights are whole on every rank. With `gather_in_forward` they travel during the next forward
       instead, the first layers' first, and a layer waits for its own: then only a layer's forward may read them.

    Between backward and the step, rank r has part r of the averaged gradients, and .grad refuses to be read (`Unread`).
    A gradient that the script puts there itself is used as it is.

    Cost for weights of S bytes in B units: 2B calls. Every rank sends and receives (n-1)/n S of gradients and as much
    of weights: together what an all-reduce sends. Memory: S of weights, S of gradients and, with AdamW, 2S/n of state;
    within backward up to S more, where gradients arrive. The step takes one n-th of the time. Choose it wherever
    `bucketed` or `ddp` would do.
    """

    shards = takes_sparse = True
    options_kind: type[BucketSizes] = ZeroOptions

    @property
    def _travels_late(self) -> bool:
        return isinstance(self.options, ZeroOptions) and self.options.gather_in_forward

    def attach(self, model: nn.Module) -> Callable:
        refuse_max_norm(model)
        call = super().attach(model)
        plan = self.plan(model)
        self.units = [self.make_unit(k, name, named) for k, (name, named) in enumerate(plan)]
        self.unit_of = {p: (unit, k) for unit in self.units for k, (_, p) in enumerate(unit.named)}
        self.lay_all()
        self._handles: list[Any] = []
        self._arriving: dict[Unit, Callable[[], None]] = {}  # units whose weights are on their way
        self._landings: list[torch.Tensor] = []  # free ones, each as long as the longest unit
        self._under_way: deque[tuple[Unit, torch.Tensor, Any]] = deque()  # reduce-scatters, with where they land
        self._local: set[nn.Parameter] = set()  # have a gradient in .grad that is not averaged yet
        self._begin()
        return call

    def plan(self, model: nn.Module) -> list[tuple[str, list[Named]]]:
        """The parameters of each unit, in the order in which their gradients are expected."""
        groups = plan_buckets(self.parameters, self.options.bucket_mb, self.options.first_bucket_mb)
        return [(f"bucket {k}", group) for k, group in enumerate(groups)]

    def make_unit(self, number: int, name: str, named: Sequence[Named]) -> Unit:
        """A unit of these parameters."""
        return Unit(number, name, named, self.rank, self.ranks)

    def lay_all(self) -> None:
        """Give all units their memory."""
        for unit in self.units:
            self.lay(unit)

    def lay(self, unit: Unit) -> None:
        """Give the unit's weights and gradients their memory."""
        unit.hold(unit.empty())
        unit.collect(unit.empty())

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step this rank's pieces in place of whole parameters. Raises UserError if it cannot."""
        self.cut = Shards(self.units, optimizer)
        self._unread: dict[nn.Parameter, torch.Tensor] = {p: Unread(p) for _, p in self.parameters}
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for _, p in self.parameters]
        for node, (_, p) in zip(self._nodes, self.parameters, strict=True):
            self._handles.append(node.register_prehook(weakly(self.make_room, p)))
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.before_step()))
        if self._travels_late:
            self.wait_in_forward()

    def wait_in_forward(self) -> None:
        """Let each layer wait for its weights. Our hook is the first: the script's own may read them."""
        for layer, own in by_layer(self.model, {p: unit for p, (unit, _) in self.unit_of.items()}).items():
            self._handles.append(layer.register_forward_pre_hook(self._waiting_for(own), prepend=True))

    def begin_forward(self) -> None:
        super().begin_forward()
        for unit in self.units:
            self.take_moved(unit)

    def take_moved(self, unit: Unit) -> None:
        """Let the unit have the weights that the script has put elsewhere."""
        unit.take_moved()

    def ready(self, parameter: nn.Parameter) -> None:
        unit, _ = self.unit_of[parameter]
        if self._travels_late and unit in self._arriving:
            name = next(name for name, p in self.parameters if p is parameter)
            raise UserError(
                f"{name} was read before its new values had arrived: outside of the forward of the layer that has it. "
                "Leave gather_in_forward out."
            )
        if parameter not in self._missing[unit]:
            name = next(name for name, p in self.parameters if p is parameter)
            raise UserError(
                f"backward computed the gradient of {name} twice in one pass. Checkpoint layers with "
                "use_reentrant=False, or run all backwards but the last inside no_sync."
            )
        self._take(parameter)
        if not self._missing[unit]:
            self.complete(unit)
        self._start_what_is_full()

    def complete(self, unit: Unit) -> None:
        """Backward has computed the unit's last gradient."""

    def finish(self) -> None:
        stood = {p for _, p in self.parameters if p.grad is self._unread[p]}  # averaged by an earlier backward
        for unit in self.units:
            for p in list(self._missing[unit]):  # backward has left it out; an earlier micro-batch may have used it
                self.make_room(p)
                self._take(p)
        self._start_what_is_full()
        is_used = dict(zip((p for _, p in self.parameters), self.agree(list(self._has.values())), strict=True))
        self.end_sums(wait=True)
        for unit, piece, part in self.cut.pieces:
            p = piece.parameter
            if is_used[p]:
                average = self._averages[unit][piece.place]
                part.grad = average if part.grad is None else part.grad.add_(average)
            if is_used[p] or p in stood:
                p.grad = self._unread[p]
        self._local.clear()
        self._begin()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        self.take_written()
        norm = self.sum_over_ranks(self.cut.squares(self.ranks)).sqrt().float()
        self.cut.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's number."""
        with self.ledger.naming("squares of the gradient", AGREEMENT):
            dist.all_reduce(squares, group=self.group)
        return squares

    def before_step(self) -> None:
        """The optimizer is about to step this rank's pieces."""
        self.wait_for(self.units)
        self.take_written()

    def take_written(self) -> None:
        """Use what the script has written: .grad, in place of the average, and memory that it gave to a weight."""
        for unit in self.units:
            self.take_moved(unit)
        for unit, piece, part in self.cut.pieces:
            p = piece.parameter
            if p.grad is None:
                part.grad = None
            elif p.grad is not self._unread[p]:
                own = unit.own(piece, dense(p.grad).detach())
                adds = p in self._local and part.grad is not None  # the last backward was inside no_sync
                part.grad = torch.add(part.grad, own) if adds else own.clone()  # type: ignore[arg-type]
                p.grad = self._unread[p]

    def after_step(self) -> None:
        """The optimizer has stepped this rank's pieces: send them."""
        # Units are in the order of backward: the next forward needs the last one first.
        self._arriving = {unit: self.start_gather(unit) for unit in reversed(self.units)}
        if not self._travels_late:
            self.wait_for(self.units)

    def start_gather(self, unit: Unit, purpose: str = PARAMETERS) -> Callable[[], None]:
        """Start to gather the unit's weights. Call the result to wait for them."""
        return start_all_gather(self, unit, unit.weights, unit.part, unit.name, purpose)

    def wait_for(self, units: Sequence[Unit]) -> None:
        """Until these units' weights are here."""
        for unit in units if self._arriving else ():
            arrive = self._arriving.pop(unit, None)
            if arrive is not None:
                arrive()

    def settle(self) -> None:
        super().settle()
        self.wait_for(self.units)
        for unit in self.units:
            self.take_moved(unit)

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's state, whole on every rank."""
        return self.cut.whole_state(self)

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a whole state. The model has its weights already."""
        for unit in self.units:
            self.take_moved(unit)
        self.cut.load(state)

    def detach(self) -> None:
        self.wait_for(self.units)
        for handle in self._handles:
            handle.remove()
        for _, p in self.parameters:
            p.data, p.grad = p.data.clone(), None
        super().detach()

    def start_sum(self, unit: Unit) -> None:
        """The unit's gradients are complete on this rank: start their reduce-scatter."""
        whole = self.landing_for(unit)
        landing = whole[: unit.length * self.ranks]
        self._under_way.append((unit, whole, start_reduce_scatter(self, unit.flat_gradients, landing, unit.name)))
        self.end_sums(wait=False)

    def landing_for(self, unit: Unit) -> torch.Tensor:
        """Memory where the unit's gradients arrive: of an earlier unit, since new memory costs as much as a copy."""
        for place, landing in enumerate(self._landings):
            if landing.dtype == unit.dtype:
                return self._landings.pop(place)
        longest = max(other.length for other in self.units if other.dtype == unit.dtype)
        return unit.part.new_empty(longest * self.ranks)

    def end_sums(self, wait: bool) -> None:
        """Average what has arrived; with `wait`, all that is under way."""
        while self._under_way and (wait or self._under_way[0][2].is_completed()):
            self.end_first()

    def end_first(self) -> None:
        """Wait for the reduce-scatter that was started first, and average what has arrived."""
        unit, whole, call = self._under_way.popleft()
        call.wait()
        self._averages[unit] = self.average_of(unit, whole[: unit.length * self.ranks])
        self._landings.append(whole)

    def average_of(self, unit: Unit, landing: torch.Tensor) -> torch.Tensor:
        """The average of this rank's part. It takes the place of the rank's own part of the gradients."""
        return add_up(landing, self.ranks, out=unit.part_of(unit.flat_gradients))

    def _begin(self) -> None:
        self._missing = {unit: {p for _, p in unit.named} for unit in self.units}
        self._has = dict.fromkeys((p for _, p in self.parameters), False)  # on this rank, in this backward
        self._next = 0  # units before it have started: every rank starts them in the same order
        self._averages: dict[Unit, torch.Tensor] = {}

    def make_room(self, parameter: nn.Parameter) -> None:
        """A gradient is about to be added to .grad. An average stays in the piece; the piece forgets what the script
        has dropped or replaced."""
        part = self.cut.own[parameter]
        if parameter.grad is self._unread[parameter]:
            parameter.grad = None
            part.grad = None if part.grad is None else part.grad.clone()  # its memory gets the next backward's
        elif parameter not in self._local:
            part.grad = None
        self._local.add(parameter)

    def _take(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient, zeros if it has none, into the unit's flat tensor."""
        unit, place = self.unit_of[parameter]
        self._missing[unit].discard(parameter)
        self.put(unit, place, parameter.grad)
        self._has[parameter] = parameter.grad is not None
        parameter.grad = None

    def put(self, unit: Unit, place: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into its place among the unit's."""
        view = unit.gradient_views[place]
        if gradient is None:
            view.zero_()
        else:
            view.copy_(dense(gradient))

    def _start_what_is_full(self) -> None:
        while self._next < len(self.units) and not self._missing[self.units[self._next]]:
            unit = self.units[self._next]
            self._next += 1
            self.start_sum(unit)

    def _waiting_for(self, units: Sequence[Unit]) -> Callable[..., None]:
        return lambda *_: self.wait_for(units)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, with its zeros if it was sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
