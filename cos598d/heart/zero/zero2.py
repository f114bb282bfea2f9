"""ZeRO stage 2: every rank keeps the gradients of its n-th alone, too."""

import contextlib
from collections.abc import Iterator

import torch

from cos598d.errors import UserError
from cos598d.heart.zero.collectives import add_up
from cos598d.heart.zero.unit import Unit
from cos598d.heart.zero.zero1 import Zero1

UNDER_WAY = 2  # reduce-scatters at a time: more would hold more memory, and hide no more time


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
    _is_inside = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def lay(self, unit: Unit) -> None:
        unit.hold(unit.empty())

    def put(self, unit: Unit, place: int, gradient: torch.Tensor | None) -> None:
        if unit.gradients is None:
            unit.collect(unit.empty())
        super().put(unit, place, gradient)

    def start_sum(self, unit: Unit) -> None:
        while len(self._under_way) >= UNDER_WAY:
            self.end_first()
        super().start_sum(unit)

    def average_of(self, unit: Unit, landing: torch.Tensor) -> torch.Tensor:
        unit.collect(None)
        return add_up(landing, self.ranks)

    def finish(self) -> None:
        super().finish()
        self._landings.clear()

    def agree(self, has: list[bool]) -> list[bool]:
        if self.options.find_unused_parameters:
            *has, some_inside, some_outside = self.any_rank([*has, self._is_inside, not self._is_inside])
        else:
            has = super().agree(has)
            some_inside, some_outside = self.any_rank([self._is_inside, not self._is_inside])
        if some_inside and some_outside:
            where = "inside" if self._is_inside else "outside of"
            raise UserError(
                f"this rank's backward is {where} no_sync, and another rank's is not: the ranks have different numbers "
                "of micro-batches in a step. Give every rank as many, since every backward is reduced."
            )
        return has
