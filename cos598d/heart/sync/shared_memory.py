"""Gradients summed in memory that the ranks of one host share, without a network."""

import mmap
import os

import torch
import torch.distributed as dist

from cos598d.heart.sync.flat import Flat
from cos598d.records.conventions import AGREEMENT


class SharedMemory(Flat):
    """Averaging in shared memory: n segments, one filled by each rank, and one result, all mapped by all ranks.

    1. After backward every rank copies its gradients into its segment, and waits for the others.
    2. Rank r adds up the r-th n-th of all segments into the result, and waits again.
    3. Every rank copies the result into its own segment, of which each .grad is a view.

    Cost for a gradient of S bytes: nothing is sent but two calls of 4 bytes, to wait. The host holds (n+1) S. Choose it
    when all ranks share a host: the library would copy each byte into the kernel and out again.
    """

    def attach(self, model):
        call = super().attach(model)
        self._shared = [share(self, bucket.buffer, self.ranks + 1) for bucket in self.buckets]
        return call

    def sum_up(self, buffer: torch.Tensor, name: str) -> None:
        place = [bucket.buffer is buffer for bucket in self.buckets].index(True)
        *segments, result = self._shared[place]
        segments[self.rank].copy_(buffer)
        self.wait()
        mine = [tensor.tensor_split(self.ranks)[self.rank] for tensor in (result, *segments)]
        torch.add(*mine[1:3], out=mine[0]) if self.ranks > 1 else mine[0].copy_(mine[1])
        for other in mine[3:]:
            mine[0].add_(other)
        self.wait()
        buffer.copy_(result)

    def wait(self) -> None:
        """Until all ranks are here."""
        with self.ledger.naming("ranks that have come", AGREEMENT):
            dist.all_reduce(torch.zeros(1), group=self.group)


def share(sync, like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` tensors like a flat one, in memory that all ranks of the host map: rank 0 makes it, the others open it.

    It has no name, and is freed with the last process that maps it. Raises OSError where ranks are on several hosts.
    """
    place = torch.zeros(2, dtype=torch.int64)
    if sync.rank == 0:
        file = os.memfd_create("cos598d")
        os.posix_fallocate(file, 0, count * max(1, like.nbytes))
        place += torch.tensor([os.getpid(), file])
    sync.broadcast(place, "shared memory", AGREEMENT)
    if sync.rank:
        file = os.open(f"/proc/{place[0]}/fd/{place[1]}", os.O_RDWR)
    memory = torch.frombuffer(mmap.mmap(file, 0), dtype=like.dtype)
    sync.broadcast(place, "all have opened it", AGREEMENT)
    dist.all_reduce(torch.zeros(1), group=sync.group)
    os.close(file)
    return list(memory.view(count, -1))
