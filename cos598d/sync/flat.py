"""All gradients in one buffer, with one all-reduce after backward."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cos598d.sync.base import GradientSync, Named
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.buckets import Bucket, plan_buckets
from cos598d.sync.codecs import End


class Flat(Bucketed):
    """Averaging in one call (one for each dtype): `bucketed` with one bucket, which waits for backward's end.

    1. After backward every rank copies its gradients into one buffer, divided by n.
    2. A ring all-reduce sums the buffers (`sum_up`).
    3. The averages are copied back into the gradients. (With `gradient_as_bucket_view` each .grad becomes a view.)

    Cost for a gradient of S bytes: 1 call; every rank sends and receives 2(n-1)/n S, and holds another S bytes. This is
    the fewest calls possible, but nothing overlaps with backward. Choose it if calls are expensive and the gradient is
    small, or to measure the cost of all-reduce itself. Syncs that sum a whole buffer in another way replace `sum_up`.
    """

    takes = (*GradientSync.takes, "gradient_as_bucket_view")
    ready = GradientSync.ready  # the buffer is filled at backward's end

    def plan(self, parameters: Sequence[Named]) -> list[list[Named]]:
        return plan_buckets(parameters, math.inf, math.inf)

    def sum_up(self, buffer: torch.Tensor, name: str) -> None:
        """Replace the buffer, (elements,), by its sum over the ranks."""
        dist.all_reduce(buffer, group=self.group)

    def start(self, bucket: Bucket) -> End:
        self.sum_up(bucket.numbers, bucket.name)
        return lambda: None
