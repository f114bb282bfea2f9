"""Gradients that are summed over the ranks while backward runs, each shard on the one rank that needs it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import ReduceScatters
from cos598d.strategies.parts.units import Unit, longest_parts
from cos598d.sync.base import GradientSync
from cos598d.sync.buckets import Named
from cos598d.sync.options import SyncOptions


class ShardedGradients(GradientSync):
    """From `finish` to `forget` each rank holds its part of every unit's summed gradient; .grad is None.

    1. A hook moves each gradient that backward has computed into its unit's flat tensor and drops it. In a unit of one
       parameter, the gradient itself becomes the flat tensor without a copy. It is only read, since autograd may share
       its memory with another parameter and with later computations.
    2. When the unit's last gradient is ready, its reduce-scatter starts (`ReduceScatters`), while backward continues.
       Units start in the same order on every rank: the order in which they are expected. After the first step, units
       with a parameter that nobody used come last, so that the others need not wait for them.
    3. `finish` starts the rest, waits for all, and finds out which parameters any rank used.

    With `keeps`, flat tensors stay from step to step. A rank's part of the sum is in its part of the flat tensor.
    Under `no_sync` each rank accumulates its own gradients there. A unit of one parameter still has a separate shard,
    and its flat tensor is freed as soon as it is reduced.
    Without `keeps`, every unit has a separate shard, and flat tensors return to a pool. Every backward is reduced,
    also under `no_sync`, and the shard accumulates.
    In both cases, a second backward without `no_sync` is reduced by itself and added.

    A subclass may sum in another way (`begin_sums`, `begin_backward`, `start`, `start_sum`, `end_sums`), and hold
    gradients in another form until they are summed (`stays`, `add`, `clear`).
    """

    def __init__(
        self,
        comm: Communicator,
        find_unused_parameters: bool,
        options: SyncOptions,
        make_units: Callable[[Sequence[Named]], list[Unit]],
        keeps: bool,
        is_complete: Callable[[Unit], None],
    ):
        """`is_complete` is called when the last of a unit's gradients of a backward is ready."""
        super().__init__(comm, find_unused_parameters, options)
        self._make_units, self._keeps, self._is_complete = make_units, keeps, is_complete
        self.embeddings: dict[nn.Parameter, nn.Embedding] = {}  # those whose gradients are sent as rows

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        self.units = self._make_units(self.parameters)
        first_tag = self.comm.take_tags(2 * len(self.units))
        for number, unit in enumerate(self.units):
            unit.number, unit.first_tag = number, first_tag
        self._order = list(self.units)
        self._place = {p: (unit, place) for unit in self.units for place, (_, p) in enumerate(unit.parameters)}
        self._flats: dict[Unit, torch.Tensor] = {}  # this rank's gradients
        self._views: dict[Unit, list[torch.Tensor]] = {}
        self._pool: list[torch.Tensor] = []
        self._shards: dict[Unit, torch.Tensor] = {}
        self._reduced: set[Unit] = set()  # those whose shard has the sum of an earlier backward of this step
        self._accumulating = False
        self._used: set[nn.Parameter] = set()  # by this rank, in this step
        self.is_used: dict[nn.Parameter, bool] = {}
        self._begin()
        self.begin_sums()
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for _, p in self.parameters]
        return module

    def shard(self, unit: Unit) -> torch.Tensor:
        """This rank's part of the sum of the unit's gradients, (own part's elements,)."""
        return self._shards[unit]

    def rows(self, unit: Unit) -> torch.Tensor | None:
        """The rows of an embedding's shard that may be nonzero, (own part's rows,) bool; None: not known."""
        return None

    def squares(self) -> torch.Tensor:
        """The sum of the squares of all elements of this rank's shards, in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        shards = self.shards()
        for norm in torch._foreach_norm(shards) if shards else ():
            total += norm.double().square()
        return total

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply this rank's shards in place."""
        shards = self.shards()
        if shards:
            torch._foreach_mul_(shards, factor)

    def shards(self) -> list[torch.Tensor]:
        """This rank's nonempty shards, unit by unit. Parameters that no rank used have zeros."""
        return [self._shards[unit] for unit in self.units if len(self._shards[unit])]

    def finish(self) -> None:
        """Block until the shards are complete and `is_used` has, for each parameter, whether any rank used it."""
        self._end()
        self.is_used = self.agree_on_used([p in self._used for _, p in self.parameters])
        # The sort is stable and its keys are agreed on: so the order is the same on every rank.
        self._order.sort(key=lambda unit: not all(self.is_used[p] for _, p in unit.parameters))

    def forget(self) -> None:
        """Drop the shards after a step, or without one. The next gradient begins a step. Sums that were begun are ended
        first, since the other ranks wait for them."""
        if self._next or self._filled:
            self._end()
        self._shards.clear()
        self._used.clear()
        self._reduced.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, self._keeps
        try:
            yield
        finally:
            self._accumulating = before
        if not self._keeps:
            self._mark_the_rest()  # the next gradients wait for what is started here

    @property
    def order(self) -> list[int]:
        """The numbers of the units in the order in which they start in the next step."""
        return [unit.number for unit in self._order]

    @order.setter
    def order(self, numbers: Sequence[int]) -> None:
        if sorted(numbers) != list(range(len(self.units))):
            raise ValueError("the order is not one of this model's units")
        self._order = [self.units[number] for number in numbers]

    def receive(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Take a gradient, of any dtype, that backward has computed."""
        if parameter not in self._waiting_for:  # a second backward: wait, since gradients being sent must not change
            self._end()
            self.set_aside()
        if gradient is not None:
            unit, place = self._place[parameter]
            self._used.add(parameter)
            is_first = parameter not in self._filled
            self._filled.add(parameter)
            self.add(unit, place, gradient, is_first)
        if not self._accumulating:
            self._mark(parameter)

    def awaits(self, unit: Unit) -> bool:
        """Whether a gradient of the unit may still come: in this backward or, between two, in the next."""
        return self._missing[unit] > 0

    def is_used_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has had a gradient for the parameter in this step."""
        return parameter in self._used

    def expect_no_more(self, units: Sequence[Unit]) -> None:
        """Backward has passed these units: mark their parameters without a gradient as unused."""
        for unit in units:
            for _, p in unit.parameters:
                if p in self._waiting_for:
                    self._mark(p)

    def begin_sums(self) -> None:
        """Prepare the sums over ranks, when the units are known."""
        self._sums = ReduceScatters(self.comm, longest_parts(self.units))

    def begin_backward(self) -> None:
        """Called on every rank before the first parameter is marked in a backward that will be reduced."""

    def start(self, unit: Unit) -> None:
        """Start the sum of the unit's gradients: all of this backward's are here, or there are none."""
        flat = self.flat(unit)[: unit.elements]
        for place, (_, p) in enumerate(unit.parameters):
            if p not in self._filled:
                self.clear(unit, place)
        if self.stays(unit) and unit not in self._reduced:
            self._shards[unit] = unit.parts(flat)[self.comm.rank]
        elif unit not in self._shards:
            self._shards[unit] = unit.empty(unit.lengths[self.comm.rank])
        self.start_sum(unit, flat, adds=unit in self._reduced)

    def start_sum(self, unit: Unit, flat: torch.Tensor, adds: bool) -> None:
        """Start the sum of every rank's `flat`, (elements of the unit,). This rank's part of it replaces the shard, or
        with `adds` is added to it."""
        release = (lambda: None) if self.stays(unit) else (lambda: self._release(unit))
        self._sums.start(
            unit.name, flat, unit.lengths, self._shards[unit], tag=unit.gradients_tag, adds=adds, then=release
        )

    def end_sums(self) -> None:
        """Block until all started sums are in their shards. No more sums of this backward will start."""
        self._sums.drain()

    def stays(self, unit: Unit) -> bool:
        """Whether the unit's flat tensor stays after it is reduced, so that the shard is a part of it."""
        return self._keeps and len(unit.parameters) > 1

    def lay(self, unit: Unit, flat: torch.Tensor) -> None:
        """Use this tensor, with at least the unit's number of elements, for the unit's gradients."""
        self._flats[unit], self._views[unit] = flat, unit.views(flat[: unit.elements])

    def add(self, unit: Unit, place: int, gradient: torch.Tensor, is_first: bool) -> None:
        """Move the gradient of the unit's parameter number `place` to its flat tensor, or add it to what is there."""
        if not is_first:
            self._views[unit][place] += gradient
        # If more will be added, the flat tensor must be this rank's own memory.
        elif len(unit.parameters) == 1 and gradient.is_contiguous() and not (self.stays(unit) or self._accumulating):
            self.lay(unit, gradient.view(-1))
        else:
            self.flat(unit)
            self._views[unit][place].copy_(gradient)

    def clear(self, unit: Unit, place: int) -> None:
        """Write zeros for the unit's parameter number `place`, which has no gradient."""
        self._views[unit][place].zero_()

    def flat(self, unit: Unit) -> torch.Tensor:
        """A writable tensor for the unit's gradients: its current one, or one from the pool."""
        if unit not in self._flats:
            fits = [flat for flat in self._pool if flat.dtype == unit.dtype and len(flat) >= unit.elements]
            kept = min(fits, key=len, default=None)
            if kept is not None:
                self._pool = [flat for flat in self._pool if flat is not kept]
            self.lay(unit, unit.empty(unit.elements) if kept is None else kept)
        return self._flats[unit]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._pool = [], []
        for by_unit in (self._flats, self._views, self._shards):
            by_unit.clear()
        self._sums = ReduceScatters(self.comm)
        super().detach()

    def gradient_tensors(self) -> list[torch.Tensor]:
        """The tensors that hold gradients, or will again."""
        return [*self._flats.values(), *self._shards.values()]

    def bucket_tensors(self) -> list[torch.Tensor]:
        """The other tensors that are kept for sending and receiving."""
        return [*self._pool, *self._sums.tensors()]

    def _begin(self) -> None:
        """Prepare a backward that will be reduced."""
        self._waiting_for = dict.fromkeys(self._place)
        self._missing = {unit: len(unit.parameters) for unit in self.units}
        self._filled: set[nn.Parameter] = set()
        self._next = 0  # index into the order: units before it have started

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        self.receive(parameter, gradient)

    def _mark(self, parameter: nn.Parameter) -> None:
        """The parameter's gradient of this backward is final, or does not exist."""
        if len(self._waiting_for) == len(self._place):
            self.begin_backward()
        del self._waiting_for[parameter]
        unit, _ = self._place[parameter]
        self._missing[unit] -= 1
        if self._missing[unit] == 0:
            self._is_complete(unit)
        while self._next < len(self._order) and self._missing[self._order[self._next]] == 0:
            self._next += 1
            self.start(self._order[self._next - 1])

    def _end(self) -> None:
        """Start the rest of this backward, wait for all of it, and prepare the next."""
        self._mark_the_rest()
        self.end_sums()
        self._begin()

    def _mark_the_rest(self) -> None:
        """Backward is over: start the rest of it."""
        for _, p in reversed(self.parameters):
            if p in self._waiting_for:
                self._mark(p)

    def set_aside(self) -> None:
        """Keep the sums so far apart, since a later backward will be added to them, also one after `finish`."""
        for unit in self.units:
            if self.stays(unit) and unit not in self._reduced:
                self._shards[unit] = self._shards[unit].clone()
        self._reduced.update(self.units)

    def _release(self, unit: Unit) -> None:
        """Drop the unit's flat tensor. It returns to the pool, unless it was one gradient itself."""
        flat = self._flats.pop(unit, None)
        self._views.pop(unit, None)
        if flat is not None and len(unit.parameters) > 1:
            self._pool.append(flat)
