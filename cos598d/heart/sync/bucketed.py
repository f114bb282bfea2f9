"""All-reduce of buckets of gradients while backward runs, as torch's DDP does it."""

from collections.abc import Sequence

from torch import nn

from cos598d.heart.sync.base import GradientSync, Named
from cos598d.heart.sync.buckets import Bucket, plan_buckets
from cos598d.heart.sync.codecs import End, make_codec


class Bucketed(GradientSync):
    """Averaging in buckets, during backward (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

    1. The gradients are assigned to buckets of at most `bucket_mb`, in the reverse order of registration, since
       backward computes the last layers' gradients first. The first bucket is small, so that its call starts early.
    2. When backward has computed a gradient, it is moved into its bucket. A bucket's ring all-reduce starts when it is
       full and all buckets before it have started. So every rank makes the same calls in the same order.
    3. At backward's end every rank starts what is left, waits for all, and divides. Each .grad is a view of its bucket.

    Cost for a gradient of S bytes in B buckets: B calls; every rank sends and receives 2(n-1)/n S. Only what follows
    the last gradient is exposed. The buckets take S bytes. A good default, like DDP.
    """

    def attach(self, model):
        call = super().attach(model)
        groups = self.plan(self.parameters)
        self.buckets = [
            Bucket(group[0][0] if len(group) == 1 else f"bucket {k}", group) for k, group in enumerate(groups)
        ]
        self.codec = make_codec(self.options.compress, self.group)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self._begin()
        return call

    def plan(self, parameters: Sequence[Named]) -> list[list[Named]]:
        """The parameters of each bucket, in the order in which the buckets are sent."""
        return plan_buckets(parameters, self.options.bucket_mb, self.options.first_bucket_mb)

    def ready(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[parameter]
        if parameter not in self._missing[bucket]:
            raise RuntimeError(f"backward reached {self._name(parameter)} twice. Use no_sync for all but the last.")
        bucket.take(parameter)
        self._missing[bucket].discard(parameter)
        while len(self._calls) < len(self.buckets) and not self._missing[self.buckets[len(self._calls)]]:
            self._start()

    def finish(self) -> None:
        has = [p.grad is not None for _, p in self.parameters]
        for bucket, missing in self._missing.items():
            for p in missing:
                bucket.take(p)
        while len(self._calls) < len(self.buckets):
            self._start()
        self.is_used = dict(zip((p for _, p in self.parameters), self.agree(has), strict=True))
        for bucket, call in zip(self.buckets, self._calls, strict=True):
            with self.ledger.naming(bucket.name):
                call()
            bucket.hand_out(self.is_used, self.ranks)
        self._begin()

    def _begin(self) -> None:
        self._missing = {bucket: set(bucket.views) for bucket in self.buckets}
        self._calls: list[End] = []

    def _start(self) -> None:
        bucket = self.buckets[len(self._calls)]
        with self.ledger.naming(bucket.name):
            self._calls.append(self.codec.start(bucket.name, bucket.buffer, [p.shape for _, p in bucket.parameters]))

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, p in self.parameters if p is parameter)
