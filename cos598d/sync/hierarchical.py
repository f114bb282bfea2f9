"""Gradients summed inside each host in shared memory, and between hosts in a ring."""

from torch import nn

from cos598d.comm import hosts
from cos598d.comm.messages import Composed
from cos598d.sync.buckets import in_buckets
from cos598d.sync.cost import Step, Travel
from cos598d.sync.cost.collectives import copied_by
from cos598d.sync.parts.ring import RING, ring_all_reduce
from cos598d.sync.parts.segmented import ByMessages, make_scratch
from cos598d.sync.shared_memory import ADD, AVERAGE, SharedMemory


class Hierarchical(SharedMemory):
    """Averaging in two levels: the ranks of a host in shared memory, one rank of each host over the network.

    1. As in `shared_memory`, every rank fills its segment during backward, divided by the number n of all ranks, and
       the ranks of each host add up their segments into the host's result.
    2. After backward the first rank of each host, when its host has added a bucket, sums the result with the other
       first ranks' in a ring (`ring`), and raises a flag.
    3. When it is raised, every rank of the host copies the bucket from the result into its own segment.
    The ranks find out by themselves which of them share a host. With one host this is `shared_memory`; with one rank on
    each it is a ring of buckets. Hosts may have different numbers of ranks.

    Cost for a gradient of S bytes among h hosts: the first rank of each sends and receives 2(h-1)/h S, all others
    nothing. A ring of all n ranks carries 2(n-1)/n S over each host's link, and as much between any two ranks inside
    a host. Nothing of 2 hides behind backward. In memory as `shared_memory`. Choose it for several hosts of several
    ranks each.
    """

    op = "hierarchical"
    overlaps = False
    not_modelled = None
    one_host = False

    def find_hosts(self) -> list[list[int]]:
        return hosts.host_groups(self.comm)

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        self._firsts = [ranks[0] for ranks in self.hosts]
        self._scratch = {}
        if self.comm.rank in self._firsts:
            # One for each dtype, of the largest bucket: the buckets go round one after another.
            for result in sorted(self.segments.result, key=lambda tensor: tensor.numel()):
                self._scratch[result.dtype] = make_scratch(result, ByMessages.segment_bytes, ByMessages.in_flight)
        return module

    def wait_for_result(self, unit: int, call: Composed) -> None:
        if self.comm.rank in self._firsts:
            self.segments.wait(ADD, unit, self.step)
            result = self.segments.result[unit]
            ring_all_reduce(call, result, self._firsts, self.comm.rank, self._scratch[result.dtype])
            self.segments.raise_flag(AVERAGE, unit, self.step)
        else:
            self.segments.wait(AVERAGE, unit, self.step, self.members[:1])

    @classmethod
    def calls(cls, step: Step) -> list[Travel]:
        firsts = [members[0] for members in step.hosts]
        buckets = in_buckets(step.tensors, step.options.bucket_mb, step.options.first_bucket_mb)
        largest = max(map(len, step.hosts))
        sizes = [sum(tensor.bytes for tensor in bucket) for bucket in buckets]
        return [
            Travel(RING, bucket, firsts, copied=copied_by(size, largest))
            for bucket, size in zip(buckets, sizes, strict=True)
        ]

    def detach(self) -> None:
        self._scratch = {}
        super().detach()
