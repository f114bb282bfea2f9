"""All gradients in one buffer, with one all-reduce after backward."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cos598d.sync.base import GradientSync
from cos598d.sync.buckets import Bucket, plan_buckets
from cos598d.sync.codecs import End, make_codec
from cos598d.sync.options import BucketViews, Compression, Options


@dataclass(frozen=True)
class FlatOptions(BucketViews, Compression):
    """One buffer needs no sizes."""


class Flat(GradientSync):
    """Averaging in one call (one for each dtype).

    1. After backward every rank copies its gradients into one buffer, divided by n.
    2. A ring all-reduce sums the buffers (`sum_up`).
    3. The averages are copied back into the gradients. (With `gradient_as_bucket_view` each .grad becomes a view.)

    Cost for a gradient of S bytes: 1 call; every rank sends and receives 2(n-1)/n S, and holds another S bytes. This is
    the fewest calls possible, but nothing overlaps with backward. Choose it if calls are expensive and the gradient is
    small, or to measure the cost of all-reduce itself. `--compress` as for `bucketed`. Syncs that sum a whole buffer in
    another way replace `sum_up`.
    """

    options_kind: type[Options] = FlatOptions

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        self.buckets = [
            Bucket(f"all of {str(group[0][1].dtype)[6:]}", group, self.ranks, self.options.gradient_as_bucket_view)
            for group in plan_buckets(self.parameters, math.inf, math.inf)
        ]
        self.codec = make_codec(self.options.compress, self._start_sum, self.group)
        return call

    def finish(self) -> None:
        is_used = dict(zip((p for _, p in self.parameters), self.used(), strict=True))
        for bucket in self.buckets:
            for _, p in bucket.parameters:
                bucket.take(p)
            with self.ledger.naming(bucket.name):
                self.codec.start(bucket.name, bucket.numbers, bucket.shapes)()
            bucket.hand_out(is_used)

    def sum_up(self, buffer: torch.Tensor, name: str) -> None:
        """Replace the buffer, (elements,), by its sum over the ranks."""
        dist.all_reduce(buffer, group=self.group)

    def own_state(self) -> dict[str, torch.Tensor]:
        return self.codec.state()

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.codec.load(state, self.device)

    def detach(self) -> None:
        self.buckets = []
        super().detach()

    def _start_sum(self, buffer: torch.Tensor, name: str) -> End:
        self.sum_up(buffer, name)
        return lambda: None
