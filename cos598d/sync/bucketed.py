"""All-reduce of buckets of gradients while backward runs: what torch's DDP does, in fifty lines."""

from collections.abc import Sequence

from cos598d.comm import Call
from cos598d.sync.buckets import Bucket, Named, plan_buckets
from cos598d.sync.overlapping import OverlappingSync


class Bucketed(OverlappingSync):
    """Averaging in buckets, during backward (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

    1. The gradients are assigned to buckets of at most `bucket_mb`, in the reverse order of registration, since
       backward computes the last layers' first; the first bucket is small, so that the first call starts early.
    2. When backward has computed a gradient, a hook copies it into its bucket, divided by n. A full bucket's ring
       all-reduce starts at once, while backward goes on.
    3. After backward every rank waits for the calls that are left. Each .grad is then a view of its bucket: nothing is
       copied back.

    Cost for a gradient of S bytes in B buckets: B calls; every rank sends and receives 2(n-1)/n S. Only what comes
    after the last gradient is exposed: the last bucket, and what the links could not carry in time. The buckets take
    S bytes beside the gradients that backward makes. Choose it for everything, as DDP.
    """

    def make_units(self, parameters: Sequence[Named]) -> list[list[Named]]:
        groups = plan_buckets(parameters, self.options.bucket_mb, self.options.first_bucket_mb)
        self.buckets = [Bucket(f"bucket {number}", group) for number, group in enumerate(groups)]
        return groups

    def ready(self, unit: int, place: int) -> None:
        self.buckets[unit].fill(place, 1 / self.comm.world_size)
        # The bucket holds it now; the memory of backward's own is free for the layers below.
        self.buckets[unit].hand_out(place)

    def start(self, unit: int) -> Call:
        return self.comm.all_reduce(self.buckets[unit].buffer, self.buckets[unit].name, async_op=True)

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        for place, used in enumerate(is_used):
            if not used:
                self.buckets[unit].hand_out(place, is_used=False)

    def detach(self) -> None:
        self.buckets = []
        super().detach()
