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
from cos598d.sync.base import GradientSync
from cos598d.sync.buckets import plan_buckets
from cos598d.sync.hooks import weakly
from cos598d.sync.options import BucketSizes
from cos598d.zero.collectives import average_of, start_all_gather, start_reduce_scatter
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
    of weights: together what an all-reduce sends. Memory: S of weights, S of gradients, S where gradients arrive and,
    with AdamW, 2S/n of state. The step takes one n-th of the time. Choose it wherever `bucketed` or `ddp` would do.
    """

    shards = takes_sparse = True
    options_kind: type[BucketSizes] = ZeroOptions

    def attach(self, model: nn.Module) -> Callable:
        refuse_max_norm(model)
        call = super().attach(model)
        self.units = self.make_units(model)
        self.place_of = {p: (unit, k) for unit in self.units for k, (_, p) in enumerate(unit.named)}
        for unit in self.units:
            self.lay(unit)
        self._handles: list[Any] = []
        self._travels_late = getattr(self.options, "gather_in_forward", False)
        self._gathers: dict[Unit, Callable[[], None]] = {}  # of weights that are on their way: call it to wait
        self.under_way: deque[tuple[Unit, Any]] = deque()  # sums of gradients
        self._kept: dict[nn.Parameter, torch.Tensor] = {}  # pieces of averages to which another backward adds
        self._begin()
        return call

    def make_units(self, model: nn.Module) -> list[Unit]:
        """All parameters in units, in the order in which their gradients are expected."""
        groups = plan_buckets(self.parameters, self.options.bucket_mb, self.options.first_bucket_mb)
        return [Unit(k, f"bucket {k}", group, self.rank, self.ranks) for k, group in enumerate(groups)]

    def lay(self, unit: Unit) -> None:
        """Give the unit's weights their memory."""
        unit.hold(unit.empty())

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step this rank's pieces in place of whole parameters. Raises UserError if it cannot."""
        self.cut = Shards(self.units, optimizer)
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for _, p in self.parameters]
        for node, (_, p) in zip(self._nodes, self.parameters, strict=True):
            self._handles.append(node.register_prehook(weakly(self.make_room, p)))
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.before_step()))
        if self._travels_late:
            # Our hook is a layer's first: the script's own may read its weights.
            for layer, own in by_layer(self.model, self.units).items():
                self._handles.append(
                    layer.register_forward_pre_hook(lambda *_, own=own: self.wait_for(own), prepend=True)
                )

    def begin_forward(self) -> None:
        super().begin_forward()
        self.check_places()

    def check_places(self) -> None:
        """Raise UserError if the script has given a weight other memory."""
        for unit in self.units:
            unit.check_places()

    def ready(self, parameter: nn.Parameter) -> None:
        unit, place = self.place_of[parameter]
        if self._travels_late and unit in self._gathers:
            raise UserError(
                f"{unit.named[place][0]} was read before its new values had arrived: outside of the forward of the "
                "layer that has it. Leave gather_in_forward out."
            )
        if parameter not in self._missing[unit]:
            raise UserError(
                f"backward computed the gradient of {unit.named[place][0]} twice in one pass. Checkpoint layers with "
                "use_reentrant=False, or run all backwards but the last inside no_sync."
            )
        self._take(parameter)
        self._start_what_is_full()

    def finish(self) -> None:
        for unit in self.units:
            for p in list(self._missing[unit]):  # backward has left it out; an earlier micro-batch may have used it
                self.make_room(p)
                self._take(p)
        self._start_what_is_full()
        used = self.agree([p in self._has for _, p in self.parameters])
        self.end_sums()
        for (_, p), is_used in zip(self.parameters, used, strict=True):
            piece, kept = self.cut.piece_of[p], self._kept.pop(p, None)
            average = self.averages[piece.unit][piece.place] if is_used else None
            piece.part.grad = average if kept is None else kept if average is None else kept.add_(average)
            p.grad = None if piece.part.grad is None else piece.unread
        self._begin()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        self.take_gradients()
        found = {piece.part.grad: piece.unit for piece in self.cut.pieces if piece.part.grad is not None}
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for unit, norm in zip(found.values(), torch._foreach_norm(list(found)), strict=True) if found else ():
            squares += norm.double().square() * (unit.ranks / self.ranks)  # what every rank has whole counts once
        norm = self.sum_over_ranks(squares).sqrt().float()
        torch._foreach_mul_(list(found), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's number."""
        with self.ledger.naming("squares of the gradient", AGREEMENT):
            dist.all_reduce(squares, group=self.group)
        return squares

    def before_step(self) -> None:
        """The optimizer is about to step this rank's pieces."""
        self.wait_for(self.units)
        self.check_places()
        self.take_gradients()

    def take_gradients(self) -> None:
        """Use what the script has written into .grad, in place of the average."""
        for piece in self.cut.pieces:
            p, kept = piece.parameter, self._kept.pop(piece.parameter, None)
            if p.grad is None:
                piece.part.grad = None
            elif not isinstance(p.grad, Unread):
                own = piece.of(p.grad.to_dense()).detach()
                piece.part.grad = own.clone() if kept is None else kept.add_(own)  # the last backward was in no_sync
                p.grad = piece.unread

    def after_step(self) -> None:
        """The optimizer has stepped this rank's pieces: send them."""
        # Units are in the order of backward: the next forward needs the last one first.
        self._gathers = {unit: self.start_gather(unit) for unit in reversed(self.units)}
        if not self._travels_late:
            self.wait_for(self.units)

    def start_gather(self, unit: Unit, purpose: str = PARAMETERS) -> Callable[[], None]:
        """Start to gather the unit's weights. Call the result to wait for them."""
        return start_all_gather(self, unit, unit.weights, unit.name, purpose)

    def wait_for(self, units: Sequence[Unit]) -> None:
        """Until these units' weights are here."""
        for unit in units if self._gathers else ():
            if end := self._gathers.pop(unit, None):
                end()

    def settle(self) -> None:
        super().settle()
        self.check_places()
        self.wait_for(self.units)

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's state, whole on every rank."""
        return self.cut.whole_state(self)

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a whole state. The model has its weights already."""
        self.check_places()
        self.cut.load(state)

    def detach(self) -> None:
        self.wait_for(self.units)
        for handle in self._handles:
            handle.remove()
        for _, p in self.parameters:
            p.data, p.grad = p.data.clone(), None
        super().detach()

    def start_sum(self, unit: Unit) -> None:
        """The unit's gradients are complete on this rank: start to bring all ranks' part r into `unit.arriving`."""
        self.under_way.append((unit, start_reduce_scatter(self, unit)))

    def end_sums(self) -> None:
        """Wait for all sums that have started."""
        while self.under_way:
            self.end_first()

    def end_first(self) -> None:
        """Wait for the sum that was started first, and average what has arrived."""
        unit, call = self.under_way.popleft()
        call.wait()
        self.averages[unit] = self.average_part(unit)

    def average_part(self, unit: Unit) -> torch.Tensor:
        """The average of this rank's part. It takes the place of the rank's own part of the gradients."""
        return average_of(unit.arriving, out=unit.part_of(unit.gradients))

    def make_room(self, parameter: nn.Parameter) -> None:
        """A gradient is about to be added to .grad. If an average is there, it is kept, since it has no room there."""
        part = self.cut.piece_of[parameter].part
        if isinstance(parameter.grad, Unread):
            parameter.grad = None
            if part.grad is not None:
                self._kept[parameter] = part.grad.clone()  # its memory gets the next backward's
        elif parameter.grad is None:  # the script has dropped it
            self._kept.pop(parameter, None)

    def put(self, unit: Unit, place: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient, zeros if there is none, into its place among the unit's."""
        if unit.gradients is None:
            unit.gradients = unit.empty()
        view = unit.view(unit.gradients, place)
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient.to_dense())

    def _begin(self) -> None:
        self._missing = {unit: {p for _, p in unit.named} for unit in self.units}
        self._has: set[nn.Parameter] = set()  # what got a gradient on this rank, in this backward
        self._next = 0  # units before it have started: every rank starts them in the same order
        self.averages: dict[Unit, torch.Tensor] = {}

    def _take(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient into the unit's flat tensor."""
        unit, place = self.place_of[parameter]
        self._missing[unit].discard(parameter)
        self.put(unit, place, parameter.grad)
        if parameter.grad is not None:
            self._has.add(parameter)
        parameter.grad = None

    def _start_what_is_full(self) -> None:
        while self._next < len(self.units) and not self._missing[self.units[self._next]]:
            unit = self.units[self._next]
            self._next += 1
            self.start_sum(unit)
            while self.under_way and self.under_way[0][1].is_completed():
                self.end_first()
