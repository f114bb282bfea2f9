"""Gradients summed in memory that the ranks of one host share, without a network."""

from collections.abc import Sequence

import torch
from torch import nn

from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.buckets import Bucket, Named, in_buckets, plan_buckets
from cos598d.sync.cost import Collective, CollectiveCall, Step
from cos598d.sync.estimate import Buffers, Load, Tensor
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.overlapping import OverlappingSync
from cos598d.sync.parts.shared_buffers import CACHE_LINE, Segments, check_on_host, find_one_host, in_blocks

FILL, ADD, AVERAGE = "fill", "add up", "average"


def copied_by(payload: float, ranks: int) -> float:
    """Bytes that each of a host's ranks reads and writes to average `payload` bytes in shared memory."""
    return (5 + 1 / ranks) * payload if ranks > 1 else 0.0


class SharedMemoryCollective(Collective):
    """Through memory that the ranks of one host share: nothing is sent. `shared_memory.py` describes what is copied."""

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        return 0, 0

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        return Load(0, 0.0, 0.0, 0.0, copied_bytes=copied_by(payload, ranks))


class SharedMemory(OverlappingSync):
    """Averaging in shared memory: n segments, one filled by each rank, and one result, all mapped by all ranks.

    1. The gradients are assigned to buckets as in `bucketed`. When backward has computed a gradient, a hook copies it
       into its bucket in the rank's own segment, divided by n. A full bucket raises this rank's first flag.
    2. When all ranks have filled a bucket, rank r adds up the r-th n-th of it from all segments into the result, block
       by block. Then it raises its second flag. During backward it does so for full buckets without waiting; afterwards
       it waits for the rest.
    3. When all ranks have added, every rank copies the whole bucket from the result into its own segment. The .grads
       are views of that, so other ranks do not see what you do to them, such as clipping.
    These two waits are enough. Others read a rank's segment only in 2, so after the second wait it is the rank's own
    again. The result is written only in 2 of the next step, after all ranks have filled again, which a rank does only
    after its copy in 3.

    Cost for a gradient of S bytes in B buckets: nothing is sent. Every rank reads 3 S of memory and writes (2 + 1/n) S:
    S and S in 1, S and S/n in 2, S and S in 3, for any number of ranks. The host holds (n+1) S for all ranks, in
    addition to the gradients that backward makes. Choose it when all ranks share a host. The library would send
    2(n-1)/n S through the loopback, and copy each byte into the kernel and out again.
    """

    uses: tuple[str, ...] = ("bucket_mb", "copies_gradients")
    op = "shared_memory"
    one_host = shares_memory = True
    not_modelled: str | None = "it is for one host only"

    def attach(self, model: nn.Module) -> nn.Module:
        check_on_host(model, self.op)
        self.hosts = self.find_hosts()
        self.step = 0
        return super().attach(model)

    def find_hosts(self) -> list[list[int]]:
        """The ranks of each host that takes part. Raises UserError, the same on every rank, for several hosts."""
        return find_one_host(self.comm, self.op, instead="hierarchical")

    def make_units(self, parameters: Sequence[Named]) -> list[list[Named]]:
        groups = plan_buckets(parameters, self.options.bucket_mb, self.options.first_bucket_mb)
        sizes = [(sum(p.numel() for _, p in group), group[0][1].dtype) for group in groups]
        self.members = next(ranks for ranks in self.hosts if self.comm.rank in ranks)
        self.segments = Segments(self.comm, self.members, sizes, (FILL, ADD, AVERAGE))
        self.buckets = [
            Bucket(f"bucket {number}", group, self.segments.own[number], self.options.copies_gradients)
            for number, group in enumerate(groups)
        ]
        # Cut once, because each step uses the same blocks.
        self._blocks = [self._cut(unit) for unit in range(len(groups))]
        return groups

    def ready(self, unit: int, place: int) -> None:
        self.buckets[unit].take(place, 1 / self.comm.world_size)

    def start(self, unit: int) -> "_Averaging":
        self.segments.raise_flag(FILL, unit, self.step)
        self._add_up(unit + 1, waits=False)
        bucket = self.buckets[unit]
        return _Averaging(self, unit, self.comm.compose(self.op, bucket.buffer, bucket.name))

    def average_bucket(self, unit: int, call: PointToPointCollective) -> None:
        """Wait until the bucket's average is in the result, and copy it into this rank's segment."""
        self._add_up(len(self.buckets), waits=True)  # all buckets first, since others wait for this rank's part
        self.wait_for_result(unit, call)
        result, own = self.segments.result[unit], self.segments.own[unit]
        if result is not own:
            own.copy_(result)

    def wait_for_result(self, unit: int, call: PointToPointCollective) -> None:
        """Block until the average over all ranks is in the bucket's result, and end the call."""
        self.segments.wait(ADD, unit, self.step)
        call.end()

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        self.buckets[unit].hand_out(is_used)

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        return [CollectiveCall(SharedMemoryCollective(), bucket) for bucket in in_buckets(step.tensors, step.options)]

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        return Buffers(unsaid="the ranks of a host share one piece of memory, and each counts all of it")

    def detach(self) -> None:
        """As in every sync. The memory is unmapped when the model's gradients, which are views of it, are freed too."""
        self.buckets, self._blocks = [], []
        self.segments.close()
        super().detach()

    def begin_step(self) -> None:
        self.step += 1
        self._added = 0
        super().begin_step()

    def _add_up(self, until: int, waits: bool) -> None:
        """Add this rank's parts of the buckets before `until`: all of them, or only those that need no waiting."""
        while self._added < until:
            if waits:
                self.segments.wait(FILL, self._added, self.step)
            elif self.segments.missing(FILL, self._added, self.step):
                return
            for total, first, second, *others in self._blocks[self._added]:
                torch.add(first, second, out=total)
                for other in others:
                    total += other
            self.segments.raise_flag(ADD, self._added, self.step)
            self._added += 1

    def _cut(self, unit: int) -> list[list[torch.Tensor]]:
        """The blocks that this rank adds up: the result's, then each segment's. None for a single rank on its host."""
        every = self.segments.every[unit]
        if not every:
            return []
        result, place = self.segments.result[unit], self.members.index(self.comm.rank)
        # No two ranks write into the same cache line.
        line = CACHE_LINE // result.element_size()
        size = -(-result.numel() // (len(every) * line)) * line
        return in_blocks([tensor[place * size : (place + 1) * size] for tensor in (result, *every)])


class _Averaging:
    """A bucket being averaged. `wait` blocks until its average is in this rank's segment, and ends its call."""

    def __init__(self, sync: SharedMemory, unit: int, call: PointToPointCollective):
        self._sync, self._unit, self._call = sync, unit, call

    def wait(self) -> None:
        self._sync.average_bucket(self._unit, self._call)
