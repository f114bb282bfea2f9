"""One all-reduce for each gradient, started as soon as backward has computed it."""

from collections.abc import Sequence

from cos598d.heart.sync.base import Named
from cos598d.heart.sync.bucketed import Bucketed


class Overlap(Bucketed):
    """Averaging as in `bucketed`, with a bucket for each gradient.

    Cost for P gradients of S bytes in all: P calls; every rank sends and receives 2(n-1)/n S, as in `all_reduce`. What
    fits into backward's time is hidden, but each of the P calls still costs its 2(n-1) steps. Choose it to see what
    overlap gains by itself.
    """

    def plan(self, parameters: Sequence[Named]) -> list[list[Named]]:
        return [[named] for named in reversed(parameters)]
