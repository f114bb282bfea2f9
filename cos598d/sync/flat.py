"""All gradients in one buffer, with one all-reduce after backward."""

from collections.abc import Sequence

import torch
from torch import nn

from cos598d.comm.calls import Call
from cos598d.sync.buckets import Bucket, in_buckets, plan_buckets
from cos598d.sync.cost import ALL_REDUCE, Collective, CollectiveCall, Step
from cos598d.sync.estimate import Buffers, Tensor
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.with_codec import WithCodec


class Flat(WithCodec):
    """Averaging in one call (one for each dtype).

    1. After backward every rank copies its gradients into one buffer, divided by n.
    2. A ring all-reduce sums the buffers.
    3. Each .grad becomes a view of its part of the buffer. (With `copies_gradients` that part is copied into it.)

    Cost for a gradient of S bytes: 1 call; every rank sends and receives 2(n-1)/n S, and holds another S bytes. This is
    the fewest calls possible, but nothing overlaps with backward. Choose it if calls are expensive and the gradient is
    small, or to measure the cost of all-reduce itself. `--compress` as for `bucketed`. Syncs that only sum a whole
    buffer in another way replace `sum_up`, and name their `collective`.
    """

    uses = ("compress", "copies_gradients")
    collective: Collective = ALL_REDUCE

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        groups = plan_buckets(self.parameters, float("inf"), float("inf"))
        copies = self.options.copies_gradients
        self.buckets = [Bucket(f"all of {str(group[0][1].dtype)[6:]}", group, copies=copies) for group in groups]
        return module

    def finish(self) -> None:
        is_used = self.agree_on_used([p.grad is not None for _, p in self.parameters])
        for bucket in self.buckets:
            for place in range(len(bucket.parameters)):
                bucket.fill(place, 1 / self.comm.world_size)
            self.codec.finish(bucket, self.codec.start(bucket, self.loss_scale))
            used = [is_used[p] for _, p in bucket.parameters]
            self.codec.put_back_unused(bucket, used)
            bucket.hand_out(used)

    def sum_up(self, tensor: torch.Tensor, name: str) -> Call:
        return self.comm.all_reduce(tensor, name)

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        return [CollectiveCall(cls.collective, group) for group in in_buckets(step.tensors)]

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        if options.compress:
            return Buffers(unsaid="the memory of the compression is not predicted")
        return Buffers(in_buckets(tensors))

    def detach(self) -> None:
        self.buckets = []
        super().detach()
