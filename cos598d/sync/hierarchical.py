"""Gradients summed inside each host in shared memory, and between hosts in a ring."""

from collections.abc import Sequence

from torch import nn

from cos598d.comm import hosts
from cos598d.comm.messages import Composed
from cos598d.sync.base import DEFAULTS, SyncOptions
from cos598d.sync.buckets import bucket_bytes
from cos598d.sync.parts.cost import Cost, Sizes
from cos598d.sync.parts.segmented import ByMessages, make_scratch
from cos598d.sync.ring import ring_all_reduce, ring_elements
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

    def find_hosts(self) -> list[list[int]]:
        return hosts.host_groups(self.comm)

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        self._firsts = [ranks[0] for ranks in self._hosts]
        self._scratch = {}
        if self.comm.rank in self._firsts:
            # One for each dtype, of the largest bucket: the buckets go round one after another.
            for result in sorted(self.segments.result, key=lambda tensor: tensor.numel()):
                self._scratch[result.dtype] = make_scratch(result, ByMessages.segment_bytes, ByMessages.in_flight)
        return module

    def wait_for_result(self, unit: int, call: Composed) -> None:
        if self.comm.rank in self._firsts:
            self.segments.wait(ADD, unit, self._step)
            result = self.segments.result[unit]
            ring_all_reduce(call, result, self._firsts, self.comm.rank, self._scratch[result.dtype])
            self.segments.raise_flag(AVERAGE, unit, self._step)
        else:
            self.segments.wait(AVERAGE, unit, self._step, self.members[:1])

    @classmethod
    def expected(
        cls,
        tensors: Sizes,
        ranks: int,
        rank: int,
        options: SyncOptions = DEFAULTS,
        groups: Sequence[Sequence[int]] = (),
    ) -> Cost:
        """`groups`: the ranks of each host, as `host_groups` gives them; none given: all share one."""
        cost = super().expected(tensors, ranks, rank, options)
        firsts = [members[0] for members in groups]
        if rank not in firsts:
            return cost
        sent = received = 0
        element_bytes = tensors[0][1]
        for payload in bucket_bytes(tensors, options.bucket_mb, options.first_bucket_mb):
            elements = ring_elements(payload // element_bytes, len(firsts), firsts.index(rank))
            sent, received = sent + elements[0] * element_bytes, received + elements[1] * element_bytes
        return Cost(cost.calls, sent, received)

    def detach(self) -> None:
        self._scratch = {}
        super().detach()
