"""ZeRO stage 2: every rank keeps the gradients of its n-th alone, too."""

import contextlib
from collections.abc import Iterator

import torch

from cos598d.errors import UserError
from cos598d.zero.collectives import add_up
from cos598d.zero.unit import Unit
from cos598d.zero.zero1 import Zero1


class Zero2(Zero1):
    """Stage 2, the gradients sharded too (Rajbhandari et al., "ZeRO", SC 2020, section 5.2: P_os+g).

    As stage 1, except:
    1. Every backward is reduced, also inside `no_sync`. Rank r adds the average of part r to what it has, and a unit's
       whole gradients are freed.
    2. With the ranks' agreement on used parameters they compare whether they are inside `no_sync`. A rank that has
       another number of micro-batches is an error on all ranks.

    Cost with a micro-batches per step: every rank sends a (n-1)/n S of gradients and (n-1)/n S of weights. Memory: as
    stage 1, but S/n of gradients from backward to the step, and within backward two units and where they arrive. Choose
    it if stage 1's gradients do not fit. Without accumulation it sends no more.
    """

    every_backward = True
    most_under_way: float = 2  # reduce-scatters at a time: more would hold more memory, and hide no more time
    _no_sync = False  # the next forward is inside no_sync
    _is_inside = False  # the last one was

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def begin_forward(self) -> None:
        super().begin_forward()
        if torch.is_grad_enabled():
            self._is_inside = self._no_sync

    def lay(self, unit: Unit) -> None:
        unit.hold(unit.empty())

    def put(self, unit: Unit, place: int, gradient: torch.Tensor | None) -> None:
        if unit.gradients is None:
            unit.collect(unit.empty())
        super().put(unit, place, gradient)

    def start_sum(self, unit: Unit) -> None:
        while len(self._under_way) >= self.most_under_way:
            self.end_first()
        super().start_sum(unit)

    def average_of(self, unit: Unit, landing: torch.Tensor) -> torch.Tensor:
        unit.collect(None)
        return add_up(landing, self.ranks)

    def landing_for(self, unit: Unit) -> torch.Tensor:
        self._landings.clear()
        return unit.empty()

    def finish(self) -> None:
        super().finish()
        self._landings.clear()

    def agree(self, has: list[bool]) -> list[bool]:
        is_inside = [self._is_inside, not self._is_inside]
        if self.options.find_unused_parameters:
            *users, some_inside, some_outside = self.count([*has, *is_inside])
            has = [number > 0 for number in users]
        else:
            has = super().agree(has)
            some_inside, some_outside = self.count(is_inside)
        if some_inside and some_outside:
            raise UserError(
                f"{some_inside} of {self.ranks} ranks are inside no_sync, and the others end their step: the "
                "ranks have different numbers of micro-batches. Give every rank as many: every backward is reduced."
            )
        return has
