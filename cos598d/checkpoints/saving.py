"""The checkpoints of a run as its training loop sees them: save, hear how it went, close."""

import contextlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cos598d.checkpoints.disks import find_far_ranks, send_parts
from cos598d.checkpoints.layout import TRAINING, Manifest
from cos598d.checkpoints.prune import tidy
from cos598d.checkpoints.restore import Checkpoint, find_best
from cos598d.checkpoints.snapshot import CheckpointPart, HostMemory, RankState, take
from cos598d.checkpoints.writer import CheckpointFolder, Writing, wait_for_key
from cos598d.comm.communicator import Communicator
from cos598d.errors import UserError
from cos598d.strategies.base import Strategy
from cos598d.terminal.files import json_text, own_folder
from cos598d.terminal.locks import locked

LONG_SECONDS = 60.0  # to wait for a disk without a word


def _say_nothing(_: str) -> None:
    """Nobody is to be told."""


class Checkpoints:
    """Where a run keeps its checkpoints; a context. Every rank makes one and calls its methods alike:

        with Checkpoints(folder, comm, keep, describe, sync, resumed) as checkpoints:
            ...
            checkpoints.save(strategy, iteration, training, own, is_best)    # between two steps
            for sentence in checkpoints.poll(): ...                          # after every step
            ...
            for sentence in checkpoints.close(): ...                         # before what follows the training

    `save` copies what this rank contributes and returns; a thread writes it while the next steps run. One checkpoint is
    written at a time: the next `save` waits for the last. A disk that refuses costs that checkpoint, not the run.
    Leaving the context without `close` gives up the one that is being written.
    """

    def __init__(
        self,
        folder: Path,
        comm: Communicator,
        keep: int,
        describe: Callable[[Path], None],
        sync: Mapping[str, Any],
        resumed: Checkpoint | None = None,
        warn: Callable[[str], None] = _say_nothing,
    ):
        """Rank 0 makes `folder` and removes what killed saves left there; whoever comes second while it is open fails.

        `keep` newest checkpoints and the best one stay. `describe(folder)` writes a model's configuration and
        vocabulary. `sync` is what the strategy's own state depends on beside the number of ranks: its name and options.
        `resumed` is the checkpoint that this run goes on from. `warn` is told where all wait long for a disk.
        Raises UserError, the same on every rank, where the folder is in use by another run or cannot be written.
        """
        self._comm, self._sync, self._warn = comm, dict(sync), warn
        self._memory = HostMemory(comm.device)
        with contextlib.ExitStack() as lock:

            def prepare() -> None:
                own_folder(folder)
                if not lock.enter_context(locked(folder)):
                    raise UserError(f"{folder} is in use by another run: choose another --output_dir.")
                tidy(folder)

            token, self._far = find_far_ranks(folder, comm, prepare)
            self._lock = lock.pop_all()
        self._near = [rank for rank in range(1, comm.world_size) if rank not in self._far]
        self._run = resumed.run if resumed else comm.exchange(secrets.token_hex(8))[0]
        self._place = CheckpointFolder(folder, keep, token, describe)
        self._folders = [folder] + ([resumed.path.parent] if resumed else [])
        self._writing: Writing | None = None
        self._saves = 0
        self._awaited: str | None = None  # the key by which rank 0 says that the latest save is over
        self._sentences: list[str] = []
        #: The iteration of the newest checkpoint that is known to be whole, on rank 0; None before the first.
        self.newest: int | None = resumed.iteration if resumed else None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._writing is not None:
            self._writing.give_up()
        self._lock.close()

    def save(
        self,
        strategy: Strategy,
        iteration: int,
        training: Mapping[str, Any],
        own: Callable[[], RankState],
        is_best: bool = False,
    ) -> None:
        """Copy the state of the training after `iteration`, and have it written.

        `training` (JSON) is what all ranks know alike, `own()` what this rank alone does, asked when the strategy has
        given its state, since the ranks may communicate for that; both come back from `Checkpoint.restore`. `is_best`:
        by whichever measure, this is better than every earlier one. Every rank must call it between two steps. Returns
        when the training may go on.
        """
        self._finish()
        comm = self._comm
        part = take(strategy, comm.rank, own, self._memory)
        if comm.rank == 0:
            part.texts[TRAINING] = json_text(
                {
                    "iteration": iteration,
                    "world_size": comm.world_size,
                    "sync": self._sync,
                    "scalars": strategy.scalars(),
                    "own_is_lost": strategy.own_is_lost,
                    "training": training,
                }
            )
        parts: list[CheckpointPart] = [part]
        if self._far:
            parts += send_parts(part, self._far, comm, self._memory)
        manifest = Manifest(self._run, iteration, comm.world_size, is_best, {})
        self._saves += 1
        self._awaited = self._place.ended_key(self._saves)
        if comm.rank in self._far:
            self._complete(part)
            return
        self._writing = Writing(
            self._place, manifest, parts, self._memory, comm.store, comm.rank, self._near, self._awaited
        )
        self._writing.start()

    def _complete(self, part: CheckpointPart) -> None:
        """On a rank that does not see rank 0's folder: bring what its part speaks of to this host's disk."""
        with contextlib.suppress(OSError):  # the record is this host's, and says so itself when it has to be whole
            part.complete()

    def poll(self) -> list[str]:
        """What there is to say since the last call, in sentences, on rank 0: a checkpoint that could not be written.

        Costs nothing. Raises what a writing thread failed with if no disk is to blame.
        """
        if self._writing is not None and not self._writing.is_alive():
            if self._comm.rank == 0:
                self._finish()
            elif self._writing.defect is not None:
                raise self._writing.defect
        sentences, self._sentences = self._sentences, []
        return sentences

    def best(self) -> Checkpoint | None:
        """The best checkpoint of this run that is there, or where it was resumed from, the same on every rank; every
        rank must call it."""
        return find_best(self._folders, self._run, self._comm)

    def close(self) -> list[str]:
        """Wait for the checkpoint that is being written, on rank 0 until it is whole; return what `poll` does."""
        self._finish()
        return self.poll()

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join(LONG_SECONDS)
            if writing.is_alive() and self._comm.rank == 0:
                self._warn(
                    f"the checkpoint of iteration {writing.manifest.iteration} is still being written to "
                    f"{self._place.folder}, and all ranks wait for it: is the disk slow, or does it not answer?"
                )
            writing.join()
            if writing.defect is not None:
                raise writing.defect
        if self._comm.rank and self._awaited is not None:
            # However long a disk takes: in a collective, patience ends with --timeout.
            wait_for_key(self._comm.store, self._awaited)
        self._awaited = None
        if self._comm.rank or writing is None:
            return
        if writing.reason is None:
            self.newest = writing.manifest.iteration
        else:
            stands = "there is none yet" if self.newest is None else f"that of iteration {self.newest} is whole"
            self._sentences.append(
                f"the checkpoint of iteration {writing.manifest.iteration} cannot be written to {self._place.folder} "
                f"({writing.reason}): make room there; the training goes on, and {stands}."
            )
        if writing.remark:
            self._sentences.append(writing.remark)
