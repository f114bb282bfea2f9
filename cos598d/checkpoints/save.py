"""The checkpoints of a run as its training sees them: save, hear how it went, close.

Which ranks write into rank 0's folder themselves is found out once; the others' parts reach rank 0 as messages.
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cos598d.checkpoints.folder import probe_name, tidy
from cos598d.checkpoints.layout import TRAINING
from cos598d.checkpoints.restore import Checkpoint, find_best, transfer
from cos598d.checkpoints.snapshot import CheckpointPart, HostMemory, RankState, take
from cos598d.checkpoints.writer import SharedFolder, Writing, wait_for_key
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UserError
from cos598d.strategies.base import Strategy
from cos598d.terminal.files import json_text, own_folder
from cos598d.terminal.locks import locked

LONG_SECONDS = 60.0  # to wait for a disk without a word


class Checkpoints:
    """Where a run keeps its checkpoints; a context. Every rank makes one and calls its methods alike:

        with Checkpoints(folder, comm, keep, describe, sync, resumed, warn) as checkpoints:
            ...
            checkpoints.save(strategy, iteration, training, own, is_best)    # between two steps
            checkpoints.poll()                                               # after every step
            ...
            newest = checkpoints.close()                                     # before what follows the training

    `save` copies what this rank contributes and returns; a thread writes it while the next steps run. One checkpoint is
    written at a time: the next `save` waits for the last. A disk that refuses costs that checkpoint and a sentence for
    `warn`, not the run. Leaving the context without `close` gives up the one that is being written.
    """

    def __init__(
        self,
        folder: Path,
        comm: Communicator,
        keep: int,
        describe: Callable[[Path], None],
        sync: Mapping[str, Any],
        resumed: Checkpoint | None,
        warn: Callable[[str], None],
    ):
        """`keep` newest checkpoints and the best one stay. `describe(folder)` writes a model's configuration and
        vocabulary. `sync` is what the strategy's own state depends on, apart from the number of ranks: its name and
        options. `resumed` is the checkpoint that this run resumes from. Rank 0's `warn` is told what there is to say.
        """
        self.folder, self.resumed, self.sync = folder, resumed, dict(sync)
        self._comm, self._keep, self._describe, self._warn = comm, keep, describe, warn
        self._memory = HostMemory(comm.device)
        self._lock = contextlib.ExitStack()
        self._place: SharedFolder | None = None
        self._writing: Writing | None = None
        self._saves = 0
        self._awaited: str | None = None  # the key by which rank 0 says that the latest save is over
        #: The iteration of the newest checkpoint that is known to be whole, on rank 0; None before the first.
        self.newest: int | None = resumed.iteration if resumed else None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._writing is not None:
            self._writing.give_up()
        self._lock.close()

    def open(self) -> SharedFolder:
        """Make the folder, if this start has not yet; rank 0 removes what killed saves have left there.

        Raises UserError, the same on every rank, where it is in use by another run or cannot be written.
        """
        if self._place is None:
            comm, folder = self._comm, self.folder
            token = self._claim()
            probe = folder / probe_name(token)
            with contextlib.suppress(OSError):  # this rank has no such folder, or may not write there
                (probe / str(comm.rank)).touch()
            comm.exchange("whoever can has written")
            far: list[int] = []
            if comm.rank == 0:
                far = [rank for rank in range(1, comm.world_size) if not (probe / str(rank)).exists()]
                shutil.rmtree(probe, ignore_errors=True)
            far, run = comm.exchange([far, self.resumed.run if self.resumed else secrets.token_hex(8)])[0]
            near = [rank for rank in range(1, comm.world_size) if rank not in far]
            self._place = SharedFolder(folder, token, run, self._keep, self._describe, comm.rank, near, far, comm.store)
        return self._place

    def _claim(self) -> str:
        """Have rank 0 lock the folder and make a probe in it; a token that all ranks share and no other start has."""
        first: dict[str, str] = {}
        if self._comm.rank == 0:
            try:
                own_folder(self.folder)
                if not self._lock.enter_context(locked(self.folder)):
                    raise UserError(f"{self.folder} is in use by another run. Choose another --output_dir.")
                tidy(self.folder)
                first["token"] = secrets.token_hex(8)
                (self.folder / probe_name(first["token"])).mkdir()
            except UserError as error:
                first["refused"] = str(error)
            except OSError as error:
                first["refused"] = (
                    f"no checkpoint can be kept in {self.folder} ({error.strerror}). Choose another --output_dir."
                )
        first = self._comm.exchange(first)[0]
        if "refused" in first:
            self._lock.close()
            raise UserError(first["refused"])
        return first["token"]

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
        when the training may continue. Raises UserError as `open` does.
        """
        place, comm = self.open(), self._comm
        self._finish()
        part = take(strategy, comm.rank, own, self._memory)
        if comm.rank == 0:
            part.texts[TRAINING] = json_text(
                {
                    "iteration": iteration,
                    "world_size": comm.world_size,
                    "sync": self.sync,
                    "scalars": strategy.scalars(),
                    "own_is_lost": strategy.own_is_lost,
                    "training": training,
                }
            )
        parts = [part, *self._gather(part, place)] if place.far else [part]
        self._saves += 1
        writing = Writing(place, self._saves, iteration, is_best, parts, self._memory)
        self._awaited = writing.ended_key
        if comm.rank in place.far:
            with contextlib.suppress(OSError):  # the record is this host's, and is checked when it has to be whole
                part.complete()
        else:
            self._writing = writing
            writing.start()

    def _gather(self, part: CheckpointPart, place: SharedFolder) -> list[CheckpointPart]:
        """On rank 0 the parts of the far ranks, which send theirs to it, in memory that the next save overwrites."""
        self._memory.wait()
        comm, content = self._comm, None
        if comm.rank in place.far:
            forms = {
                file: {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named.items()}
                for file, named in part.tensors.items()
            }
            content = [forms, part.metadata, part.texts]
        contents, found = comm.exchange(content), []
        for rank in place.far:
            tensors = part.tensors
            if comm.rank == 0:
                forms, metadata, texts = contents[rank]
                tensors = {
                    file: {
                        name: self._memory.empty(f"{rank}/{name}", tuple(shape), getattr(torch, dtype))
                        for name, (dtype, shape) in named.items()
                    }
                    for file, named in forms.items()
                }
                found.append(CheckpointPart(tensors, metadata, texts))
            transfer(comm, tensors, source=rank, target=0)
        return found

    def poll(self) -> None:
        """Say what there is to say of a checkpoint that could not be written. Costs nothing.

        Raises what a writing thread failed with if no disk is to blame.
        """
        if self._writing is not None and not self._writing.is_alive():
            if self._comm.rank == 0:
                self._finish()
            elif self._writing.defect is not None:
                raise self._writing.defect

    def load_best(self, model: nn.Module, iteration: int) -> bool:
        """Give `model`, whole on every rank, the weights that were best, after `iteration`; whether they are there."""
        folders = [self.folder] + ([self.resumed.path.parent] if self.resumed else [])
        found = find_best(folders, self.open().run, self._comm)
        if found is None or found.iteration != iteration:
            return False
        found.load_model(model, self._comm)
        return True

    def close(self) -> int | None:
        """Wait until what is being written is on the disk; the iteration of the newest whole checkpoint, if any."""
        if self._place is None:  # nothing was saved by this start
            return self.newest
        self._finish()
        return self._comm.exchange(self.newest)[0]

    def _finish(self) -> None:
        """Wait for the latest save, and say how it went."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join(LONG_SECONDS)
            if writing.is_alive() and self._comm.rank == 0:
                self._warn(
                    f"the checkpoint of iteration {writing.iteration} is still being written to {self.folder}, and "
                    "all ranks wait for it. Check whether that disk is slow or does not answer."
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
            self.newest = writing.iteration
        else:
            stands = "there is none yet" if self.newest is None else f"that of iteration {self.newest} is complete"
            self._warn(
                f"the checkpoint of iteration {writing.iteration} cannot be written to {self.folder} "
                f"({writing.reason}). Training continues, and {stands}. Make room there."
            )
        if writing.remark:
            self._warn(writing.remark)
