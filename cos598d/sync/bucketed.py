"""All-reduce of buckets of gradients while backward runs, as torch's DDP does it."""

from collections.abc import Sequence

import torch

from cos598d.comm.calls import Call, Pending
from cos598d.sync.buckets import Bucket, Named, in_buckets, plan_buckets
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step
from cos598d.sync.estimate import Buffers, Tensor
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.overlapping import OverlappingSync
from cos598d.sync.parts.with_codec import WithCodec


class Bucketed(WithCodec, OverlappingSync):
    """Averaging in buckets, during backward (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

    1. The gradients are assigned to buckets of at most `bucket_mb`, in the reverse order of registration, since
       backward computes the last layers' gradients first. The first bucket is small, so that its call starts early.
    2. When backward has computed a gradient, a hook copies it into its bucket, divided by n, and .grad becomes a view
       of that copy. A full bucket's ring all-reduce starts at once, while backward continues.
    3. After backward every rank waits for the remaining calls. Each .grad is a view of its bucket, so nothing is copied
       back. (With `copies_gradients`, .grad stays autograd's, and the averages are copied back into it.)

    The hooks are those of `OverlappingSync`. It calls `ready` for each gradient, `start` for each full bucket (which it
    calls a unit), and `end` for each bucket from `finish`.

    Cost for a gradient of S bytes in B buckets: B calls; every rank sends and receives 2(n-1)/n S. Only what follows
    the last gradient is exposed: the last bucket, and whatever the network has not finished sending. The buckets take S
    bytes; backward's own gradient of a parameter is freed as soon as it is copied. `--compress` sends the buckets
    compressed (`cos598d/sync/codecs`). A good default, like DDP.
    """

    uses = ("bucket_mb", "compress", "copies_gradients")

    def make_units(self, parameters: Sequence[Named]) -> list[list[Named]]:
        self._under_way: dict[int, tuple[Bucket, Pending]] = {}
        groups = plan_buckets(parameters, self.options.bucket_mb, self.options.first_bucket_mb)
        copies = self.options.copies_gradients
        self.buckets = [Bucket(f"bucket {number}", group, copies=copies) for number, group in enumerate(groups)]
        return groups

    def ready(self, unit: int, place: int) -> None:
        self.buckets[unit].take(place, 1 / self.comm.world_size)

    def start(self, unit: int) -> Pending:
        return self.send(unit, self.buckets[unit])

    def send(self, unit: int, bucket: Bucket) -> Pending:
        """Start to send the unit's full bucket."""
        pending = self.codec.start(bucket, self.loss_scale)
        self._under_way[unit] = bucket, pending
        return pending

    def receive(self, unit: int, is_used: Sequence[bool]) -> Bucket:
        """The unit's bucket with the averages."""
        bucket, pending = self._under_way.pop(unit)
        self.codec.finish(bucket, pending)
        self.codec.put_back_unused(bucket, is_used)
        return bucket

    def sum_up(self, tensor: torch.Tensor, name: str) -> Call:
        return self.comm.all_reduce(tensor, name, async_op=True)

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        self.receive(unit, is_used).hand_out(is_used)

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall] | None:
        return [CollectiveCall(ALL_REDUCE, bucket) for bucket in in_buckets(step.tensors, step.options)]

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        if options.compress:
            return Buffers(unsaid="the memory of the compression is not predicted")
        return Buffers(in_buckets(tensors, options), at_once=True)

    def detach(self) -> None:
        self.buckets = []
        super().detach()
