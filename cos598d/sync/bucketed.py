"""All-reduce of buckets of gradients while backward runs, as torch's DDP does it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.base import GradientSync, Named
from cos598d.sync.buckets import Bucket, plan_buckets
from cos598d.sync.codecs import Codec, End, get_codec

SIZED = ("bucket_mb", "first_bucket_mb", "gradient_as_bucket_view")  # options for buckets of a size that is given


class Bucketed(GradientSync):
    """Averaging in buckets, during backward (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

    1. The gradients are assigned to buckets of at most `bucket_mb`, in the reverse order of registration, since
       backward computes the last layers' gradients first. A larger tensor is a bucket of its own. The first bucket is
       small, so that its call starts early.
    2. When backward has computed a gradient, it is copied into its bucket, divided by n. A bucket's ring all-reduce
       starts when it is full and all buckets before it have started. So every rank makes the same calls in the same
       order, whatever the order in which its gradients arrive.
    3. At backward's end every rank starts what is left, waits for all calls in order, and copies the averages back.
       (With `gradient_as_bucket_view` each .grad becomes a view of its bucket, and nothing is copied back.)

    Cost for a gradient of S bytes in B buckets: B calls; every rank sends and receives 2(n-1)/n S. Only what follows
    the last gradient is exposed: the last bucket, and whatever the network has not finished sending. The buckets take S
    bytes. `--compress` sends the buckets compressed (`codecs.py`). A good default, like DDP.
    """

    takes = (*GradientSync.takes, *SIZED, "compress")

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        groups = self.plan(self.parameters)
        names = [group[0][0] if len(group) == 1 else f"bucket {number}" for number, group in enumerate(groups)]
        self.buckets = [self.make_bucket(name, group) for name, group in zip(names, groups, strict=True)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        kind, number = get_codec(self.options.compress) if self.options.compress and self.ranks > 1 else (Codec, 0)
        self.codec = kind(number, self.group)
        self._ends: list[End] = []  # of the buckets whose sum has started
        return call

    def plan(self, parameters: Sequence[Named]) -> list[list[Named]]:
        """The parameters of each bucket, in the order in which the buckets are sent."""
        return plan_buckets(parameters, self.options.bucket_mb, self.options.first_bucket_mb)

    def make_bucket(self, name: str, group: Sequence[Named]) -> Bucket:
        """A bucket for these parameters."""
        return Bucket(name, group, self.ranks, self.options.gradient_as_bucket_view)

    def ready(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            name = next(name for name, p in self.parameters if p is parameter)
            raise UserError(
                f"one backward reached {name} twice, as reentrant checkpoints that share a parameter do. Checkpoint "
                "with use_reentrant=False, or choose all_reduce."
            )
        bucket.take(parameter)
        self._start_full()

    def finish(self) -> None:
        has = [p.grad is not None for _, p in self.parameters]
        for bucket in self.buckets:
            for p in list(bucket.missing):  # the last backward left it out; an earlier one may have computed it
                bucket.take(p)
        self._start_full()
        # Only now: every rank has started every bucket, so this call has the same place in the order too.
        self.is_used = dict(zip((p for _, p in self.parameters), self.agree(has), strict=True))
        ends = list(zip(self.buckets, self._ends, strict=True))
        self._ends = []
        for bucket, end in ends:  # it grows, where an end has a second part that is to wait for the others' first
            with self.ledger.naming(bucket.name):
                more = end()
            if callable(more):
                ends.append((bucket, more))
            else:
                bucket.hand_out(self.is_used)

    def _start_full(self) -> None:
        """Start the buckets that are full, up to the first that is not."""
        for bucket in self.buckets[len(self._ends) :]:
            if bucket.missing:
                break
            with self.ledger.naming(bucket.name):
                self._ends.append(self.start(bucket))

    def start(self, bucket: Bucket) -> End:
        """Start to replace the bucket's numbers by their sum over the ranks. Return what ends it."""
        return self.codec.start(bucket.name, bucket.numbers, bucket.shapes)

    def own_state(self) -> dict[str, torch.Tensor]:
        return self.codec.kept

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.codec.kept = {name: tensor.to(self.device, copy=True) for name, tensor in state.items()}

    def detach(self) -> None:
        self.buckets, self._bucket_of = [], {}
        super().detach()
