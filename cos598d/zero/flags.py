"""Flags by which the ranks of one host wait for each other, in memory that they share."""

import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cos598d.errors import UserError
from cos598d.sync.base import GradientSync
from cos598d.sync.shared_memory import share_file

# A rank that waits frees its core for the others: there may be more ranks than cores.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 30e-6, 500e-6


class Flags:
    """One byte for each rank and stage of the work: how often the rank has come to it, modulo 256.

    Ranks that wait for each other at a stage are at most one round apart there, so a flag that is one ahead is up too.
    A rank that reads a flag also sees what was written to any shared memory before it, on every architecture: to write
    or read a file the kernel takes and drops a reference to its page, by atomic operations that are full barriers.
    """

    def __init__(self, sync: GradientSync, stages: Sequence[str], note_bytes: int):
        """stages: what a rank does there, as verbs for an error. note_bytes: of what a rank tells the others there."""
        self._rank, self._ranks, self._stages, self._note = sync.rank, sync.ranks, list(stages), note_bytes
        self._rounds, self._meetings = [0] * len(stages), 0
        self._notes = len(stages) * sync.ranks  # where notes begin
        self._file = share_file(sync, self._notes + 2 * sync.ranks * note_bytes, range(sync.ranks))
        group = sync.group or dist.group.WORLD
        assert group is not None
        self._seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def come(self, stage: int) -> None:
        """This rank has come to a stage."""
        self._rounds[stage] += 1
        os.pwrite(self._file, bytes([self._rounds[stage] % 256]), stage * self._ranks + self._rank)

    def late(self, stage: int) -> list[int]:
        """The ranks that have not come to this stage as often as this one."""
        flags = os.pread(self._file, self._ranks, stage * self._ranks)
        return [rank for rank, flag in enumerate(flags) if (flag - self._rounds[stage]) % 256 > 1]

    def wait(self, stage: int) -> None:
        """Until all have. Raises UserError with the missing ranks after the process group's timeout."""
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while late := self.late(stage):
            if time.monotonic() - began > self._seconds:
                raise UserError(
                    f"ranks {', '.join(map(str, late))} did not {self._stages[stage]} within {self._seconds:g} s. See "
                    "what they are doing, or give a longer timeout."
                )
            time.sleep(pause)
            pause = min(1.3 * pause, LONGEST_PAUSE_SECONDS)

    def meet(self, stage: int, note: bytes = b"") -> list[bytes]:
        """Come to a stage with a note, and wait for all. Every rank's note, in order of rank."""
        self._meetings += 1
        # Two places in turn: a rank comes to the next meeting when all have read this one's notes, to no later one.
        first = self._notes + self._meetings % 2 * self._ranks * self._note
        os.pwrite(self._file, note, first + self._rank * self._note)
        self.come(stage)
        self.wait(stage)
        return [os.pread(self._file, self._note, first + rank * self._note)[: len(note)] for rank in range(self._ranks)]

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._file)
