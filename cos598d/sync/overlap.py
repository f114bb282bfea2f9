"""One all-reduce for each gradient, started while backward runs."""

from collections.abc import Sequence

from cos598d.sync.base import GradientSync, Named
from cos598d.sync.bucketed import Bucketed


class Overlap(Bucketed):
    """All-reduce tensor by tensor, during backward: `bucketed` with a bucket for each gradient.

    1. When backward has computed a gradient, every rank copies it, divided by n. Its ring all-reduce starts when those
       of all gradients before it have started. The order is the reverse of registration, mostly that of arrival.
    2. Backward continues with the layers below while the ring runs.
    3. After backward every rank waits for the remaining calls.

    Cost for P gradients of S bytes in all: P calls; every rank sends and receives 2(n-1)/n S, as in `all_reduce`. What
    fits into backward's time is hidden, but each of the P calls still costs its 2(n-1) steps: too many for small
    tensors. Choose it to see what overlap gains by itself; `bucketed` does the same with fewer calls.
    """

    takes = (*GradientSync.takes, "gradient_as_bucket_view")

    def plan(self, parameters: Sequence[Named]) -> list[list[Named]]:
        return [[named] for named in reversed(parameters)]
