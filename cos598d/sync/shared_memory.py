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
from cos598d.sync.base import GradientSync, Named, Options
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs import Codec, End
from cos598d.sync.options import PlainBucketOptions
from cos598d.world.network import network_identity


class SharedMemory(Bucketed):
    """Averaging in shared memory: n segments, one filled by each rank, and one result, all mapped by all ranks.

    1. The gradients are assigned to buckets as in `bucketed`. When backward has computed a gradient, it is copied into
       its bucket in the rank's own segment, divided by n. A full bucket is announced.
    2. When all ranks have filled a bucket, rank r adds up the r-th n-th of it from all segments into the result, and
       announces that.
    3. When all ranks have added, every rank copies the whole bucket from the result into its own segment.
    These two waits are enough. Others read a rank's segment only in 2, so after the second wait it is the rank's own
    again. The result is written only in 2 of the next step, after all ranks have filled again, which a rank does only
    after its copy in 3.

    Cost for a gradient of S bytes in B buckets: nothing is sent but 2B announcements, all-reduces of 4 bytes. Every
    rank reads 3 S of memory and writes (2 + 1/n) S, for any number of ranks. The host holds (n+1) S for all ranks.
    Choose it when all ranks share a host. The library would send 2(n-1)/n S through the loopback, and copy each byte
    into the kernel and out again.
    """

    options_kind: type[Options] = PlainBucketOptions  # nothing is sent, so nothing is compressed

    def attach(self, model: nn.Module) -> Callable:
        for name, p in model.named_parameters():
            if p.device.type != "cpu":
                raise UserError(
                    f"shared_memory needs tensors in the host's memory, and {name} is on {p.device}. Choose ddp, or "
                    "keep the model on the CPU."
                )
        hosts = ranks_by_host(self)
        if len(hosts) > 1:
            raise UserError(
                f"shared_memory needs all ranks on one host, and rank {hosts[1][0]} is on another host than rank 0. "
                "Choose hierarchical."
            )
        self._result: dict[Bucket, torch.Tensor] = {}
        self._parts: dict[Bucket, list[torch.Tensor]] = {}
        return super().attach(model)

    def make_codec(self) -> Codec:
        return Codec(self.start_sum, group=self.group)

    def make_bucket(self, name: str, group: Sequence[Named]) -> Bucket:
        like = torch.empty(sum(p.numel() for _, p in group), dtype=group[0][1].dtype)
        *segments, result = share(self, like, range(self.ranks), self.ranks + 1)
        bucket = Bucket(name, group, self.ranks, self.options.gradient_as_bucket_view, segments[self.rank])
        self._result[bucket] = result
        self._parts[bucket] = [tensor.tensor_split(self.ranks)[self.rank] for tensor in (result, *segments)]
        return bucket

    def start(self, bucket: Bucket) -> End:
        filled = self._announce("filled", bucket)

        def add_up() -> End:
            filled.wait()
            total, first, *others = self._parts[bucket]
            total.copy_(first)
            for part in others:
                total += part
            added = self._announce("added up", bucket)

            def copy() -> None:
                with self.ledger.composing("shared_memory", bucket.numbers, bucket.name):
                    added.wait()
                    bucket.buffer.copy_(self._result[bucket])

            return copy

        return add_up

    def _announce(self, done: str, bucket: Bucket) -> Any:
        """Tell all ranks that this one has done its part of the bucket. Wait for it to know that all have."""
        with self.ledger.naming(f"ranks that have {done} {bucket.name}", AGREEMENT):
            return dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)

    def detach(self) -> None:
        """As in every sync. The memory is unmapped when the gradients that are views of it are freed too."""
        self._result, self._parts = {}, {}
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


def share(sync: GradientSync, like: torch.Tensor, members: Sequence[int], count: int) -> list[torch.Tensor]:
    """`count` tensors like a flat one, in memory that the `members`, the ranks of this host, map. Every rank calls it.

    1. The first member allocates a file of zeros in memory at once (memfd_create), and tells the others its process and
       descriptor. If there is not enough memory, this raises an error now; later the out-of-memory killer would end the
       run.
    2. They open it as /proc/PID/fd/N. It has no name, and is freed with the last process that maps or has it.
    Raises UserError, the same on every rank, if the memory cannot be shared.
    """
    size, file, place, problem = count * max(1, like.nbytes), -1, None, ""
    try:
        if sync.rank == members[0]:
            file = os.memfd_create("cos598d", os.MFD_CLOEXEC)
            os.posix_fallocate(file, 0, size)
            place = f"/proc/{os.getpid()}/fd/{file}"
    except (AttributeError, OSError) as error:  # AttributeError: only Linux has memfd_create
        problem = str(error)
    place = sync.exchange(place)[members[0]]
    try:
        file = os.open(place, os.O_RDWR | os.O_CLOEXEC) if file < 0 and place else file
    except OSError as error:
        problem = str(error)
    for rank, its in enumerate(sync.exchange(problem)):  # now all have opened it
        if its:
            raise UserError(
                f"rank {rank} cannot share {size / 2**20:.0f} MiB of memory ({its}). Free memory, or choose bucketed."
            )
    memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)[: count * like.nbytes]
    os.close(file)
    return list(memory.view(like.dtype).view(count, -1))
