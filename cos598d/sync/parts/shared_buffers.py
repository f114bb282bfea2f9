"""Memory that the ranks of one host share, and the flags by which they wait for each other in it."""

import errno
import mmap
import os
import time
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from cos598d.comm import hosts
from cos598d.comm.communicator import Communicator
from cos598d.errors import UserError
from cos598d.terminal.words import ranks_in_words
from cos598d.world.limits import available_bytes

CACHE_LINE = 64
# A waiting rank frees its core for the others: there may be more ranks than cores.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 30e-6, 500e-6
# Small enough that a block of a sum stays in a core's cache while the ranks' blocks are added to it.
BLOCK_BYTES = 256 << 10


class Segments:
    """Buffers of the ranks of one host, in one piece of memory that all of them map.

    For each buffer i there is

    every[i][k]   the one of the k-th of `members`; only that rank writes to it
    own[i]        this rank's among them
    result[i]     one for all ranks together
    common[j]     further buffers that exist once, for all ranks

    1. The first member allocates all of the memory at once (memfd_create), and sends the others its process and file
       descriptor. If there is not enough memory, this raises an error now; otherwise the out-of-memory killer would end
       the run later.
    2. They open it as /proc/PID/fd/N, and all map it. The memory has no name. When the last process that maps it ends,
       in whatever way, it is freed.
    A single rank on its host shares nothing: its buffers are ordinary memory, and `result` is `own`.

    Flags are one byte for each member, stage of the work and buffer. A rank raises one by writing the number of the
    step, modulo 256. It is one byte, since a longer number might be read half-written. Modulo 256 is enough, because
    ranks that wait for each other in every step are never 256 steps apart.
    """

    def __init__(
        self,
        comm: Communicator,
        members: Sequence[int],
        buffers: Sequence[tuple[int, torch.dtype]],
        stages: Sequence[str],
        names: Sequence[str] = (),
        common: Sequence[tuple[int, torch.dtype]] = (),
    ):
        """Every rank of the world must call it. members: the ranks on this one's host; buffers: (elements, dtype) of
        each, and of the `common` ones; stages: what is done to a buffer, as verbs for errors; names: the buffers' names
        in errors. Raises UserError, the same on every rank, if the memory cannot be shared."""
        self._members, self._stages = list(members), list(stages)
        self._names = list(names) or [f"bucket {i}" for i in range(len(buffers))]
        self._place, self._count = self._members.index(comm.rank), len(buffers)
        self._timeout = comm.timeout_seconds
        flags = _round_up(len(stages) * self._count * len(members), mmap.PAGESIZE)
        offsets, segment = _layout(buffers)
        common_offsets, rest = _layout(common)

        file = _open_shared(comm, self._members, flags + (1 + len(members)) * segment + rest)
        if file is None:
            memory, starts = torch.zeros(segment + rest, dtype=torch.uint8), [0, segment]
            self._fd, self._closer = None, None
        else:
            self._fd, self._closer = file, weakref.finalize(self, os.close, file)
            # Every tensor keeps the mapping alive, so it lives as long as the last of them.
            memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
            starts = [flags + number * segment for number in range(2 + len(members))]

        def part(first: int, buffer: tuple[int, torch.dtype]) -> torch.Tensor:
            elements, dtype = buffer
            return memory[first : first + elements * dtype.itemsize].view(dtype)

        first, *others, last = starts
        placed = list(zip(offsets, buffers, strict=True))
        self.result = [part(first + offset, buffer) for offset, buffer in placed]
        self.every = [[part(start + offset, buffer) for start in others] for offset, buffer in placed]
        self.common = [part(last + offset, buffer) for offset, buffer in zip(common_offsets, common, strict=True)]
        self.own = [parts[self._place] if parts else self.result[i] for i, parts in enumerate(self.every)]

    def raise_flag(self, stage: str, i: int, step: int) -> None:
        """Report to the others that this rank has done `stage` with buffer `i` in `step`."""
        if self._fd is not None:
            # A rank that reads the flag also sees what was written before it, on every architecture. To write or read a
            # file, the kernel takes and drops a reference to its page, by atomic operations that are full barriers.
            os.pwrite(self._fd, bytes([step % 256]), self._position(stage, i) + self._place)

    def missing(self, stage: str, i: int, step: int) -> list[int]:
        """The ranks that have not raised this flag in `step`."""
        if self._fd is None:
            return []
        flags = os.pread(self._fd, len(self._members), self._position(stage, i))
        return [rank for rank, flag in zip(self._members, flags, strict=True) if flag != step % 256]

    def wait(self, stage: str, i: int, step: int, ranks: Sequence[int] | None = None) -> None:
        """Block until `ranks` (default: all members) have raised this flag.

        Raises UserError, with the missing ranks, after the process group's timeout. If a rank is killed meanwhile, the
        watchdog reports it and ends this process.
        """
        deadline, pause = None, FIRST_PAUSE_SECONDS
        while late := [rank for rank in self.missing(stage, i, step) if ranks is None or rank in ranks]:
            now = time.monotonic()
            deadline = deadline or now + self._timeout
            if now > deadline:
                names = ranks_in_words(late)
                raise UserError(
                    f"{names} did not {stage} {self._names[i]} within {self._timeout:g} s. "
                    f"See what it is doing, or give a longer --timeout."
                )
            time.sleep(pause)
            pause = min(1.3 * pause, LONGEST_PAUSE_SECONDS)

    def close(self) -> None:
        """Drop the memory. It is unmapped when the last view of it is freed, such as a parameter's .grad."""
        self.result, self.every, self.own, self.common = [], [], [], []
        if self._closer:
            self._closer()
        self._fd = None

    def _position(self, stage: str, i: int) -> int:
        return (self._stages.index(stage) * self._count + i) * len(self._members)


def check_on_host(model: nn.Module, name: str) -> None:
    """Raise UserError if a parameter of the model, which `--sync name` is to train, is on a device."""
    for parameter, p in model.named_parameters():
        if p.device.type != "cpu":
            raise UserError(
                f"--sync {name} needs tensors in the host's memory, and {parameter} is on {p.device}. "
                f"Choose --sync ddp, or --no_cuda."
            )


def find_one_host(comm: Communicator, name: str, instead: str) -> list[list[int]]:
    """The ranks of each host. `--sync name` supports one host: raises UserError, the same on every rank, for several
    hosts, and suggests the sync `instead`."""
    groups = hosts.host_groups(comm)
    if len(groups) > 1:
        raise UserError(
            f"--sync {name} needs all ranks on one host, and rank {groups[1][0]} is on another host than rank 0. "
            f"Choose --sync {instead}."
        )
    return groups


def in_blocks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Views of tensors of equal length and dtype, (elements,), in blocks: for each block one view per tensor."""
    blocks = (tensor.split(max(1, BLOCK_BYTES // tensor.element_size())) for tensor in tensors)
    return [list(block) for block in zip(*blocks, strict=True)]


def _open_shared(comm: Communicator, members: list[int], size: int) -> int | None:
    """A file descriptor of `size` bytes that the members share; None for a single member.

    Every rank of the world takes part in both exchanges, so that an error is the same on all.
    """
    file, place, problem = None, None, ""
    if len(members) > 1 and comm.rank == members[0]:
        try:
            file = os.memfd_create("cos598d", os.MFD_CLOEXEC)
            _claim(file, size)
            place = [os.getpid(), file]
        except AttributeError:
            problem = "this system has no memfd_create, which only Linux has. Choose --sync bucketed"
        except OSError as error:
            problem = (
                f"the ranks of its host cannot share {size / 2**20:.0f} MiB of memory ({error.strerror}). "
                f"Free memory, or choose --sync bucketed"
            )
    place = comm.exchange(place)[members[0]]
    if file is None and place:
        try:
            file = os.open(f"/proc/{place[0]}/fd/{place[1]}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            problem = (
                f"the memory of rank {members[0]} cannot be opened ({error.strerror}). "
                f"Start all ranks as one user in one container, or choose --sync bucketed"
            )
    for rank, other in enumerate(comm.exchange(problem)):
        if other:
            if file is not None:
                os.close(file)
            raise UserError(f"rank {rank}: {other}.")
    return file


def _claim(file: int, size: int) -> None:
    """Give an empty file in memory `size` bytes and all of its pages. Raises OSError if memory is too small.

    Setting only its length would reserve nothing: pages are allocated when they are first written, or the process is
    killed then. Since the kernel may kill it for allocated pages too, the free memory is checked first.
    """
    if size > available_bytes():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    os.posix_fallocate(file, 0, size)


def _layout(buffers: Sequence[tuple[int, torch.dtype]]) -> tuple[list[int], int]:
    """Where each of the buffers begins, in bytes, and the bytes of all together."""
    offsets, end = [], 0
    for elements, dtype in buffers:
        offsets.append(end)
        end = _round_up(end + elements * dtype.itemsize, CACHE_LINE)
    return offsets, _round_up(end, mmap.PAGESIZE)


def _round_up(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`; at least one unit, since an empty file cannot be mapped."""
    return max(1, -(-size // unit)) * unit
