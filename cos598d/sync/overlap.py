"""One all-reduce for each gradient, started as soon as backward has computed it."""

from collections.abc import Sequence

import torch

from cos598d.comm.calls import Call
from cos598d.sync.buckets import Named
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step
from cos598d.sync.parts.overlapping import OverlappingSync


class Overlap(OverlappingSync):
    """All-reduce tensor by tensor, during backward.

    1. As soon as backward has computed a gradient, every rank divides it by n, into memory of its own, and starts its
       ring all-reduce. The order is the reverse of registration, which is the order of arrival.
    2. Backward continues with the layers below while the ring runs.
    3. After backward every rank waits for the remaining calls.

    Cost for P gradients of S bytes in all: P calls; every rank sends and receives 2(n-1)/n S, as in `all_reduce`. What
    fits into backward's time is hidden, but each of the P calls still costs its 2(n-1) steps: too many for small
    tensors. Choose it to see what overlap gains by itself; `bucketed` does the same with fewer calls.
    """

    keeps_nothing = takes_sparse = True

    def make_units(self, parameters: Sequence[Named]) -> list[list[Named]]:
        self._averages: dict[int, torch.Tensor] = {}  # gradients, or their averages being computed, by unit
        return [[named] for named in reversed(parameters)]

    def ready(self, unit: int, place: int) -> None:
        parameter = self.units[unit][place][1]
        # Not in place: autograd may have shared this memory with another parameter, or still need it.
        self._averages[unit] = self.fill_in(parameter) / self.comm.world_size
        if not self.options.copies_gradients:
            parameter.grad = self._averages[unit]

    def start(self, unit: int) -> Call:
        return self.comm.all_reduce(self._averages[unit], self.units[unit][0][0], async_op=True)

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        parameter, average = self.units[unit][0][1], self._averages.pop(unit)
        if not is_used[0]:
            parameter.grad = None
        elif self.options.copies_gradients and parameter.grad is not None:
            parameter.grad.copy_(average)
        else:
            parameter.grad = average

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        return [CollectiveCall(ALL_REDUCE, [tensor]) for tensor in reversed(step.tensors)]
