"""Gradients summed in memory that the ranks of one host share, without a network."""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT
from cos598d.sync.base import GradientSync, Named
from cos598d.sync.bucketed import SIZED, Bucketed
from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs import End
from cos598d.world.network import network_identity


class SharedMemory(Bucketed):
    """Averaging in shared memory: n segments, one filled by each rank, and one result, all mapped by all ranks.

    1. The gradients are assigned to buckets as in `bucketed`. When backward has computed a gradient, it is copied into
       its bucket in the rank's own segment, divided by n. A full bucket is announced.
    2. When all ranks have filled a bucket, rank r adds up the r-th n-th of it from all segments into the result: if it
       can, while backward runs. At backward's end it announces that.
    3. When all ranks have added, every rank copies the whole bucket from the result into its own segment.
    These two waits are enough. Others read a rank's segment only in 2, so after the second wait it is the rank's own
    again. The result is written only in 2 of the next step, after all ranks have filled again, which a rank does only
    after its copy in 3.

    Cost for a gradient of S bytes in B buckets: nothing is sent but 2B announcements, all-reduces of 4 bytes. Every
    rank reads 3 S of memory and writes (2 + 1/n) S, for any number of ranks. The host holds (n+1) S for all ranks.
    Choose it when all ranks share a host. The library would send 2(n-1)/n S through the loopback, and copy each byte
    into the kernel and out again.
    """

    takes = (*GradientSync.takes, *SIZED)

    def attach(self, model: nn.Module) -> Callable:
        for name, p in model.named_parameters():
            if p.device.type != "cpu":
                raise UserError(
                    f"shared_memory needs tensors in the host's memory, and {name} is on {p.device}. Choose ddp, or "
                    "keep the model on the CPU."
                )
        need_one_host(self, "hierarchical")
        self._filled: dict[Bucket, Any] = {}  # announcements of buckets that are not added up yet
        self._memory: dict[Bucket, torch.Tensor] = {}  # all ranks' segments, and the result, (n + 1, elements)
        return super().attach(model)

    def make_bucket(self, name: str, group: Sequence[Named]) -> Bucket:
        like = torch.empty(sum(p.numel() for _, p in group), dtype=group[0][1].dtype)
        memory = share(self, like, self.ranks + 1)
        bucket = Bucket(name, group, self.ranks, self.options.gradient_as_bucket_view, memory[self.rank])
        self._memory[bucket] = memory
        return bucket

    def start(self, bucket: Bucket) -> End:
        for earlier, filled in list(self._filled.items()):
            if filled.is_completed():  # so less is left for backward's end
                self._add_up(earlier)
        self._filled[bucket] = self._announce("filled", bucket)

        def end() -> End:
            self._add_up(bucket)
            added = self._announce("added up", bucket)

            def copy() -> None:
                with self.ledger.composing("shared_memory", bucket.numbers, bucket.name):
                    added.wait()
                    bucket.buffer.copy_(self._memory[bucket][-1])

            return copy

        return end

    def _add_up(self, bucket: Bucket) -> None:
        """Put the sum of this rank's part of all segments into the result, when all ranks have filled the bucket."""
        if filled := self._filled.pop(bucket, None):
            filled.wait()
            own = self._memory[bucket].tensor_split(self.ranks, dim=1)[self.rank]
            torch.sum(own[:-1], dim=0, out=own[-1])

    def _announce(self, done: str, bucket: Bucket) -> Any:
        """Tell all ranks that this one has done its part of the bucket. Wait for it to know that all have."""
        with self.ledger.naming(f"ranks that have {done} {bucket.name}", AGREEMENT):
            return dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)

    def detach(self) -> None:
        """As in every sync. The memory is unmapped when the gradients that are views of it are freed too."""
        self._memory = {}
        super().detach()


def ranks_by_host(sync: GradientSync) -> list[list[int]]:
    """The ranks of each host, in order of rank; hosts in the order of their first ranks. Every rank must call it.

    Ranks share a host if they can share memory and need no network. A container, or a virtual host of an emulated
    cluster, counts as a host of its own: it has another namespace of process ids.
    """
    groups: dict[str, list[int]] = {}
    for rank, identity in enumerate(sync.exchange(network_identity("pid"))):
        groups.setdefault(identity, []).append(rank)
    return list(groups.values())


def need_one_host(sync: GradientSync, instead: str) -> None:
    """Raise UserError, the same on every rank, if the ranks are on several hosts. `instead`: the syncs to choose."""
    hosts = ranks_by_host(sync)
    if len(hosts) > 1:
        raise UserError(
            f"{type(sync).__name__} needs all ranks on one host, and rank {hosts[1][0]} is on another host than rank "
            f"0. Choose {instead}."
        )


def share(sync: GradientSync, like: torch.Tensor, count: int) -> torch.Tensor:
    """`count` rows like a flat tensor, in memory that all ranks map, which share a host. Every rank calls it.

    1. Rank 0 allocates a file of zeros in memory at once (memfd_create), and tells the others its process and
       descriptor. If there is not enough memory, this raises an error now; later the out-of-memory killer would end the
       run.
    2. They open it as /proc/PID/fd/N. It has no name, and is freed with the last process that maps or has it.
    Raises UserError, the same on every rank, if the memory cannot be shared.
    """
    size, file, problem = count * like.nbytes, -1, ""
    try:
        if sync.rank == 0:
            file = os.memfd_create("cos598d", os.MFD_CLOEXEC)
            os.posix_fallocate(file, 0, size)
    except (AttributeError, OSError) as error:  # AttributeError: only Linux has memfd_create
        problem = str(error)
    place = sync.exchange(f"/proc/{os.getpid()}/fd/{file}")[0]
    try:
        file = os.open(place, os.O_RDWR | os.O_CLOEXEC) if sync.rank else file
    except OSError as error:
        problem = str(error)
    for rank, its in enumerate(sync.exchange(problem)):  # now all have opened it
        if its:
            raise UserError(
                f"rank {rank} cannot share {size / 2**20:.0f} MiB of memory ({its}). Free memory, or choose bucketed."
            )
    memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    os.close(file)
    return memory.view(like.dtype).view(count, -1)
