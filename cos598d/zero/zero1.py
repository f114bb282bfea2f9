"""ZeRO stage 1: every rank keeps the optimizer's state of one n-th of the weights, and steps only those."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT, PARAMETERS
from cos598d.sync.base import GradientSync, Named
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.codecs import End
from cos598d.sync.hooks import weakly
from cos598d.zero.collectives import start_all_gather
from cos598d.zero.layers import by_layer, refuse_max_norm
from cos598d.zero.shards import Shards
from cos598d.zero.unit import Unit


class Zero1(Bucketed):
    """Stage 1, the optimizer's state sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5.1: P_os).

    1. The parameters are packed into units, as gradients are into the buckets of `bucketed`. A tensor larger than
       `bucket_mb` is a unit of its own. A unit's weights lie side by side in a flat tensor, and so do its gradients,
       divided by n. Both are cut into n parts.
    2. When backward has computed a unit's last gradient, its reduce-scatter starts, while backward continues. Rank r
       sends part k to rank k, and adds the n parts that arrive, in order of rank. Every rank starts the units in the
       same order.
    3. The optimizer of rank r holds only the pieces of parameters in part r, and steps them in place.
    4. An all-gather of each unit: rank r sends part r of the weights to every other rank. When `optimizer.step()`
       returns, the weights are whole on every rank.

    With `gather_in_forward` the weights travel during the next forward instead, the first layers' first. Each layer
    waits for its own, so only a layer's forward may read them.

    Between backward and the step, rank r has part r of the averaged gradients, and .grad refuses to be read (`Unread`).
    A gradient of the script's own is refused.

    Cost for weights of S bytes in B units: 2B calls. Every rank sends and receives (n-1)/n S of gradients and as much
    of weights: together what an all-reduce sends. Memory: S of weights, S of gradients, S where gradients arrive and,
    with AdamW, 2S/n of state. The step takes one n-th of the time. Choose it wherever `bucketed` or `ddp` would do.
    """

    shards = True
    takes = (*GradientSync.takes, "bucket_mb", "first_bucket_mb", "gather_in_forward")
    buckets: Any  # units

    def attach(self, model: nn.Module) -> Callable:
        refuse_max_norm(model)
        self._handles: list[Any] = []
        self._travels_late = self.options.gather_in_forward
        self._gathers: dict[Unit, Callable[[], None]] = {}  # of weights that are on their way: call it to wait
        return super().attach(model)

    def make_bucket(self, name: str, group: Sequence[Named]) -> Any:
        return Unit(name, group, self.rank, self.ranks)

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step this rank's pieces in place of whole parameters. Raises UserError if it cannot."""
        self.cut = Shards(self.buckets, optimizer)
        for p, piece in self.cut.piece_of.items():
            self._handles.append(get_gradient_edge(p).node.register_prehook(weakly(piece.make_room, p)))
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.before_step()))
        # Our hook is a layer's first: the script's own may read its weights.
        for layer, own in by_layer(self.model, self.buckets).items() if self._travels_late else ():
            hook = layer.register_forward_pre_hook(lambda *_, own=own: self.wait_for(own), prepend=True)
            self._handles.append(hook)

    def begin_forward(self) -> None:
        super().begin_forward()
        self.check_places()

    def check_places(self) -> None:
        """Raise UserError if the script has given a weight other memory."""
        for unit in self.buckets:
            unit.check()

    def ready(self, parameter: nn.Parameter) -> None:
        if (piece := self.cut.piece_of[parameter]).unit in self._gathers:
            raise UserError(f"{piece.name} was read before its new values had arrived. Leave gather_in_forward out.")
        super().ready(parameter)

    def start(self, unit: Any) -> End:
        for earlier in self.buckets:
            if earlier.call and earlier.call.is_completed():  # so less is left for backward's end
                self.end(earlier)
        unit.call = self.start_parts(unit)
        return partial(self.end, unit)

    def start_parts(self, unit: Unit) -> Any:
        """The unit's gradients are complete on this rank: start to bring all ranks' part r into `unit.arriving`.

        An all-to-all: every rank sends and receives (n-1)/n S. gloo's own reduce-scatter would send twice as much.
        """
        if unit.arriving is None:
            unit.arriving = unit.empty().view(unit.ranks, -1)
        return dist.all_to_all_single(unit.arriving.view(-1), unit.gradients, group=self.group, async_op=True)

    def end(self, unit: Unit) -> None:
        """Wait for what has started, and average what has arrived."""
        if unit.call:
            unit.call.wait()
            unit.call, unit.average = None, self.average_part(unit)

    def average_part(self, unit: Unit) -> torch.Tensor:
        """The average of this rank's part. It takes the place of the rank's own part of the gradients."""
        return torch.sum(unit.arriving, dim=0, out=unit.part_of(unit.gradients))

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        pieces = self.cut.averaged()
        # What every rank has whole counts once.
        own: list[Any] = [piece.part.grad for piece in pieces if piece.unit.ranks == self.ranks or not self.rank]
        squares = nn.utils.get_total_norm(own).double().square().to(self.device)
        with self.ledger.naming("squares of the gradient", AGREEMENT):
            dist.all_reduce(squares, group=self.group)
        norm = squares.sqrt().float()
        nn.utils.clip_grads_with_norm_([piece.part for piece in pieces], max_norm, norm)
        return norm

    def before_step(self) -> None:
        """The optimizer is about to step this rank's pieces."""
        self.wait_for(self.buckets)
        self.check_places()
        self.cut.averaged()

    def after_step(self) -> None:
        """The optimizer has stepped this rank's pieces: send them."""
        # Units are in the order of backward: the next forward needs the last one first.
        self.gather(reversed(self.buckets), PARAMETERS)
        if not self._travels_late:
            self.wait_for(self.buckets)

    def gather(self, units: Iterable[Unit], purpose: str) -> None:
        """Start to gather these units' weights."""
        for unit in units:
            self._gathers[unit] = start_all_gather(self, unit, unit.weights, unit.name, purpose)

    def wait_for(self, units: Sequence[Unit]) -> None:
        """Until these units' weights are here."""
        for unit in units if self._gathers else ():
            if end := self._gathers.pop(unit, None):
                end()
                unit.show()

    def settle(self) -> None:
        super().settle()
        self.check_places()
        self.wait_for(self.buckets)

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's state, whole on every rank."""
        return self.cut.whole_state(self)

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a whole state. The model has its weights already."""
        self.cut.load(state)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for _, p in self.parameters:
            p.data, p.grad = p.data.clone(), None
        super().detach()
