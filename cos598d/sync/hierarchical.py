"""Gradients summed inside each host in shared memory, and between hosts in a ring."""

from collections.abc import Sequence

import torch
from torch import nn

from cos598d.comm import hosts
from cos598d.comm.calls import Call
from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.buckets import Bucket, in_buckets
from cos598d.sync.cost import CollectiveCall, Step
from cos598d.sync.parts.ring import RING, ring_all_reduce
from cos598d.sync.parts.segmented import ByMessages, make_scratch
from cos598d.sync.parts.with_codec import WithCodec
from cos598d.sync.shared_memory import ADD, AVERAGE, SharedMemory, copied_by


class Hierarchical(WithCodec, SharedMemory):
    """Averaging in two levels: the ranks of a host in shared memory, one rank of each host over the network.

    1. As in `shared_memory`, every rank fills its segment during backward, divided by the number n of all ranks. The
       ranks of each host add up their segments into the host's result.
    2. After backward, when a host has added a bucket, its first rank sums the result with the other first ranks in a
       ring (`ring`). Then it raises a flag.
    3. When it is raised, every rank of the host copies the bucket from the result into its own segment.
    The ranks find out by themselves which of them share a host. With one host this is `shared_memory`; with one rank
    on each it is a ring of buckets. Hosts may have different numbers of ranks.

    Cost for a gradient of S bytes among h hosts: the first rank of each sends and receives 2(h-1)/h S, all others
    nothing. For comparison, a ring of all n ranks sends 2(n-1)/n S over each host's link, and as much between any two
    ranks inside a host. Nothing of 2 overlaps with backward. In memory as `shared_memory`. Choose it for several hosts
    of several ranks each.

    `--compress` compresses what is sent between hosts; sums within a host stay exact. Error feedback belongs to a host,
    and its first rank saves it. A rank that becomes a first one by a resume on other hosts begins without any.
    """

    uses = ("bucket_mb", "compress", "copies_gradients")
    op = "hierarchical"
    overlaps = False
    not_modelled = None
    one_host = False

    def find_hosts(self) -> list[list[int]]:
        return hosts.host_groups(self.comm)

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        # One per dtype, for the longest tensor so far: tensors are summed one after another.
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        results = zip(self.buckets, self.segments.result, strict=True)
        self._sums = [Bucket(bucket.name, bucket.parameters, result) for bucket, result in results]
        return module

    def codec_ranks(self) -> Sequence[int]:
        return [ranks[0] for ranks in self.hosts]

    def wait_for_result(self, unit: int, call: PointToPointCollective) -> None:
        if self.comm.rank in self.codec_ranks():
            self.segments.wait(ADD, unit, self.step)
            self.codec.finish(self._sums[unit], self.codec.start(self._sums[unit], self.loss_scale))
            self.segments.raise_flag(AVERAGE, unit, self.step)
        else:
            self.segments.wait(AVERAGE, unit, self.step, self.members[:1])
            call.end()

    def sum_up(self, tensor: torch.Tensor, name: str) -> Call:
        scratch = make_scratch(tensor, ByMessages.segment_bytes, ByMessages.in_flight, self._scratch.get(tensor.dtype))
        self._scratch[tensor.dtype] = scratch
        with self.comm.composed(self.op, tensor, name) as call:
            ring_all_reduce(call, tensor, self.codec_ranks(), self.comm.rank, scratch)
        return Call.done()

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        self.codec.put_back_unused(self._sums[unit], is_used)
        super().end(unit, is_used)

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        firsts = [members[0] for members in step.hosts]
        buckets = in_buckets(step.tensors, step.options)
        largest = max(map(len, step.hosts))
        return [
            CollectiveCall(RING, bucket, firsts, copied=copied_by(sum(tensor.bytes for tensor in bucket), largest))
            for bucket in buckets
        ]

    def detach(self) -> None:
        self._scratch, self._sums = {}, []
        super().detach()
