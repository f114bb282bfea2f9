"""Gradients summed inside each host in shared memory, and between hosts in a ring."""

import torch
import torch.distributed as dist

from cos598d.sync.base import Options
from cos598d.sync.buckets import Bucket, as_real
from cos598d.sync.codecs import Codec, End, make_codec
from cos598d.sync.options import BucketOptions
from cos598d.sync.shared_memory import SharedMemory, ranks_by_host


class Hierarchical(SharedMemory):
    """Averaging in two levels: the ranks of a host in shared memory, one rank of each host over the network.

    1. As in `shared_memory`, every rank fills its segment during backward, divided by the number n of all ranks. The
       ranks of each host add up their segments into the host's result.
    2. After backward, when all have added a bucket, the first rank of each host sums the result with the other first
       ranks by a ring all-reduce, and announces that.
    3. Then every rank of the host copies the bucket from the result into its own segment.
    The ranks find out by themselves which of them share a host. With one host this is `shared_memory`; with one rank
    on each it is a ring of buckets. Hosts may have different numbers of ranks.

    Cost for a gradient of S bytes among h hosts: the first rank of each sends and receives 2(h-1)/h S, all others
    nothing but 3B announcements. For comparison, a ring of all n ranks sends 2(n-1)/n S over each host's link, and as
    much between any two ranks inside a host. Nothing of 2 overlaps with backward. In memory as `shared_memory`. Choose
    it for several hosts of several ranks each.

    `--compress` compresses what is sent between hosts; sums within a host stay exact. Error feedback belongs to a host,
    and its first rank saves it. A rank that becomes a first one by a resume on other hosts begins without any.
    """

    options_kind: type[Options] = BucketOptions
    op = "hierarchical"

    def find_hosts(self) -> list[list[int]]:
        return ranks_by_host(self)

    def make_codec(self) -> Codec:
        firsts = [ranks[0] for ranks in self.hosts]
        self.is_first = self.rank in firsts
        self.firsts = dist.new_group([self.peer(rank) for rank in firsts], use_local_synchronization=True)
        if not self.is_first:
            return Codec(self.start_sum, group=self.group)
        return make_codec(self.options.compress, self.start_sum, self.firsts)

    def start_sum(self, numbers: torch.Tensor, name: str) -> End:
        return dist.all_reduce(numbers, group=self.firsts, async_op=True).wait

    def between(self, bucket: Bucket) -> None:
        if len(self.hosts) == 1:
            return
        if self.is_first:
            self.codec.start(bucket.name, as_real(self._result[bucket]), bucket.shapes)()
        self.announce("received", bucket).wait()
