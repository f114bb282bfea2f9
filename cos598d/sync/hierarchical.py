"""Gradients summed inside each host first, then between hosts in a ring."""

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import SIZED, Bucketed
from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs import End
from cos598d.sync.shared_memory import ranks_by_host


class Hierarchical(Bucketed):
    """Averaging in two levels: among the ranks of a host, and among the first ranks of all hosts.

    1. As in `bucketed`, every rank fills its buckets during backward, divided by the number n of all ranks. The ranks
       of a host sum a full bucket at the host's first rank (reduce).
    2. After backward the first ranks sum the buckets by a ring all-reduce.
    3. Each first rank sends the sum to its host's other ranks (broadcast).
    The ranks find out by themselves which of them share a host. With one host this is a reduce and a broadcast; with
    one rank on each it is a ring of buckets. Hosts may have different numbers of ranks.

    Cost for a gradient of S bytes among h hosts: between hosts, the first rank of each sends and receives 2(h-1)/h S,
    all others nothing. A ring of all n ranks sends 2(n-1)/n S over each host's link. Inside a host of m ranks, each
    sends S to the first, which sends ceil(log2 m) S. Only 1 overlaps with backward. Choose it for several hosts of
    several ranks each.
    """

    takes = (*GradientSync.takes, *SIZED)

    def attach(self, model: nn.Module) -> Callable:
        hosts = ranks_by_host(self)
        members = next(ranks for ranks in hosts if self.rank in ranks)
        firsts = [ranks[0] for ranks in hosts] if self.rank == members[0] else [self.rank]
        self.first = self.peer(members[0])
        # Each rank makes two groups, since torch names them by how many it has made. Who is no first one is alone.
        self.host, self.firsts = (
            dist.new_group([self.peer(rank) for rank in ranks], use_local_synchronization=True)
            for ranks in (members, firsts)
        )
        return super().attach(model)

    def start(self, bucket: Bucket) -> End:
        summing = dist.reduce(bucket.numbers, self.first, group=self.host, async_op=True)

        def among_hosts() -> End:
            summing.wait()
            summing_hosts = dist.all_reduce(bucket.numbers, group=self.firsts, async_op=True)

            def to_all() -> None:
                summing_hosts.wait()
                dist.broadcast(bucket.numbers, self.first, group=self.host)

            return to_all

        return among_hosts
