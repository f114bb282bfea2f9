"""All gradients in one buffer, with one all-reduce after backward."""

import torch
import torch.distributed as dist

from cos598d.heart.sync.base import GradientSync
from cos598d.heart.sync.buckets import Bucket, plan_buckets


class Flat(GradientSync):
    """Averaging in one call (one for each dtype).

    1. After backward every rank copies its gradients into one buffer.
    2. A ring all-reduce sums the buffers (`sum_up`), and every rank divides by n.
    3. Each .grad becomes a view of its part of the buffer.

    Cost for a gradient of S bytes: 1 call; every rank sends and receives 2(n-1)/n S, and holds another S bytes. The
    fewest calls possible, but nothing overlaps with backward. Syncs that sum a buffer in another way replace `sum_up`.
    """

    def attach(self, model):
        call = super().attach(model)
        groups = plan_buckets(self.parameters, float("inf"), float("inf"))
        self.buckets = [Bucket(f"all of {str(group[0][1].dtype)[6:]}", group) for group in groups]
        return call

    def finish(self) -> None:
        is_used = dict(zip((p for _, p in self.parameters), self.used(), strict=True))
        for bucket in self.buckets:
            for _, p in bucket.parameters:
                bucket.take(p)
            with self.ledger.naming(bucket.name):
                self.sum_up(bucket.buffer, bucket.name)
            bucket.hand_out(is_used, self.ranks)

    def sum_up(self, buffer: torch.Tensor, name: str) -> None:
        """Replace the buffer, (elements,), by its sum over the ranks."""
        dist.all_reduce(buffer, group=self.group)
