"""The checkpoints of a run, from its training's side: save, report failures, close.

The ranks find out once which of them write into rank 0's folder themselves. The others send their parts to rank 0.
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

LONG_SECONDS = 60.0  # how long to wait for a disk silently


class Checkpoints:
    """The checkpoints of a run; a context. Every rank creates one and makes the same calls:

        with Checkpoints(folder, comm, keep, describe, sync, resumed, warn) as checkpoints:
            ...
            checkpoints.save(strategy, iteration, training, own, is_best)    # between two steps
            checkpoints.poll()                                               # after every step
            ...
            newest = checkpoints.close()                                     # before what follows the training

    `save` copies what this rank contributes and returns; a thread writes it while the next steps run. One checkpoint is
    written at a time: the next `save` waits for the last. If the disk refuses, only that checkpoint is lost, and `warn`
    gets a sentence. Leaving the context without `close` gives up the one that is being written.
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
        """The `keep` newest checkpoints and the best one are kept. `describe(folder)` writes a model's configuration
        and vocabulary. `sync` is what the strategy's own state depends on, in addition to the number of ranks: its name
        and options. `resumed` is the checkpoint that this run resumes from. Rank 0 calls `warn` with a sentence."""
        self.folder, self.resumed, self.sync = folder, resumed, dict(sync)
        self._comm, self._keep, self._describe, self._warn = comm, keep, describe, warn
        self._memory = HostMemory(comm.device)
        self._lock = contextlib.ExitStack()
        self._place: SharedFolder | None = None
        self._writing: Writing | None = None
        self._saves = 0
        self._awaited: str | None = None  # the key that rank 0 sets when the latest save is over
        #: The iteration of the newest checkpoint known to be complete, on rank 0; None before the first.
        self.newest: int | None = resumed.iteration if resumed else None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._writing is not None:
            self._writing.give_up()
        self._lock.close()

    def open(self) -> SharedFolder:
        """Create the folder, once per attempt. Rank 0 removes what killed saves have left there.

        Raises UserError, the same on every rank, if another run uses it or it cannot be written.
        """
        if self._place is None:
            comm, folder = self._comm, self.folder
            token = self._claim()
            probe = folder / probe_name(token)
            with contextlib.suppress(OSError):  # this rank has no such folder, or no write permission
                (probe / str(comm.rank)).touch()
            comm.exchange("all ranks that can write have written")
            far: list[int] = []
            if comm.rank == 0:
                far = [rank for rank in range(1, comm.world_size) if not (probe / str(rank)).exists()]
                shutil.rmtree(probe, ignore_errors=True)
            far, run = comm.exchange([far, self.resumed.run if self.resumed else secrets.token_hex(8)])[0]
            near = [rank for rank in range(1, comm.world_size) if rank not in far]
            self._place = SharedFolder(folder, token, run, self._keep, self._describe, comm.rank, near, far, comm.store)
        return self._place

    def _claim(self) -> str:
        """Make rank 0 lock the folder and create a probe in it. Return a token that only this attempt's ranks share."""
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
        """Copy the training's state after `iteration`, and start to write it.

        `training` (JSON) is equal on all ranks. `own()` is this rank's state; it is called after the strategy has given
        its own, since the ranks may communicate for that. Both come back from `Checkpoint.restore`. `is_best`: this is
        better than every earlier one, by any measure. Every rank must call it between two steps. It returns when the
        training may continue. Raises UserError as `open` does.
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
            with contextlib.suppress(OSError):  # the record is on this host, and is checked when it must be complete
                part.complete()
        else:
            self._writing = writing
            writing.start()

    def _gather(self, part: CheckpointPart, place: SharedFolder) -> list[CheckpointPart]:
        """On rank 0: the parts of far ranks, which send them to it, in memory that the next save overwrites."""
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
        """Report a checkpoint that could not be written. Costs nothing.

        Raises the error of a writing thread if no disk caused it.
        """
        if self._writing is not None and not self._writing.is_alive():
            if self._comm.rank == 0:
                self._finish()
            elif self._writing.defect is not None:
                raise self._writing.defect

    def load_best(self, model: nn.Module, iteration: int) -> bool:
        """Load the best weights, of `iteration`, into `model`, whole on every rank. Return whether they exist."""
        folders = [self.folder] + ([self.resumed.path.parent] if self.resumed else [])
        found = find_best(folders, self.open().run, self._comm)
        if found is None or found.iteration != iteration:
            return False
        found.load_model(model, self._comm)
        return True

    def close(self) -> int | None:
        """Wait until everything is on the disk. Return the iteration of the newest complete checkpoint, if any."""
        if self._place is None:  # this attempt has saved nothing
            return self.newest
        self._finish()
        return self._comm.exchange(self.newest)[0]

    def _finish(self) -> None:
        """Wait for the latest save, and report a failure."""
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
            # However long a disk takes: a collective would time out after --timeout.
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
