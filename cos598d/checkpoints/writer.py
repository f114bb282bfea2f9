"""One checkpoint on its way to the disk, in a thread of its own while the training goes on.

Every rank that sees rank 0's folder does this at once, into a folder beside the checkpoint's place:

    1. It writes its part (rank 0 also the parts of ranks that do not see the folder), hashing on the way, and waits
       until each file is on the disk, as are the rows of the record that the part speaks of.
    2. It tells rank 0 through the ranks' store the files' sizes and digests, or why it failed. Not by a file: a full
       disk would not take it.
    3. Rank 0 waits for all, writes the manifest, gives the folder its name, and removes what is needed no more.

Killed at any moment, it leaves the older checkpoints as they were, and at most a folder that the next start removes.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import Store

from cos598d.checkpoints.layout import MANIFEST, MODEL_FOLDER, Manifest, Written, beside_name, step_name
from cos598d.checkpoints.prune import check_replaceable, discard, prune
from cos598d.checkpoints.snapshot import CheckpointPart, HostMemory
from cos598d.checkpoints.tensors import write_bytes, write_tensors
from cos598d.errors import first_line
from cos598d.terminal.files import sync_folder, sync_to_disk, unfinished

SPARE_BYTES = 1 << 20  # what a checkpoint leaves free on the disk, for the run's record
SHORTEST_POLL, LONGEST_POLL = 0.005, 0.1  # seconds between two looks for the other ranks' word
GIVEN_UP = "given up"
GIVE_UP_SECONDS = 5.0  # a disk that does not answer keeps nobody from leaving
NICENESS = 10  # the training's threads go first


@dataclass(frozen=True)
class CheckpointFolder:
    """Where a run's checkpoints are written: the folder, how many are kept, and the token of this start of the run.

    describe: writes what a model's folder needs beside the weights (configuration, vocabulary) into the folder that it
    is given; called on rank 0, on the writing thread.
    """

    folder: Path
    keep: int
    token: str
    describe: Callable[[Path], None]

    def partial(self, iteration: int) -> Path:
        """The folder in which a checkpoint grows."""
        return self.folder / beside_name(step_name(iteration), self.token, "partial")

    def ended_key(self, number: int) -> str:
        """What rank 0 sets in the ranks' store when the save of this number is over, however it went."""
        return f"checkpoint/{self.token}/ended/{number}"


class Writing(threading.Thread):
    """A checkpoint that is being written; `join` waits for this rank's part, on rank 0 for all of it.

    After that `reason` is None if it is there, else why it is not; `remark` what else did not work. Both are rank 0's.
    `defect` is an error, on any rank, that no disk made.
    """

    reason: str | None = None
    remark: str | None = None
    defect: Exception | None = None

    def __init__(
        self,
        place: CheckpointFolder,
        manifest: Manifest,
        parts: Sequence[CheckpointPart],
        memory: HostMemory,
        store: Store,
        rank: int,
        others: Sequence[int],
        ended_key: str,
    ):
        """`manifest` is without its files; `others` are the ranks besides rank 0 that write for themselves; rank 0 sets
        `ended_key` in the store when it is over."""
        super().__init__(name=f"checkpoint {manifest.iteration}", daemon=True)
        self.manifest = manifest
        self._place, self._parts, self._memory = place, parts, memory
        self._store, self._rank, self._others, self._ended_key = store, rank, others, ended_key
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """Stop soon, and remove what there is; do not wait for other ranks, which may be gone."""
        self._is_given_up.set()
        self.join(GIVE_UP_SECONDS)

    def run(self) -> None:
        """Write; never raises."""
        if sys.platform == "linux":  # elsewhere it would be the whole process's
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._lead() if self._rank == 0 else self._follow()
        except Exception as error:  # the store is gone: so are the ranks, or soon
            self.defect = error
        self._parts = ()
        if self._rank == 0:
            with contextlib.suppress(Exception):  # the same
                self._store.set(self._ended_key, "")

    def _follow(self) -> None:
        self._tell(*self._try(self._write_parts))

    def _lead(self) -> None:
        partial = self._place.partial(self.manifest.iteration)
        with unfinished(partial):
            try:
                reasons = self._assemble(partial)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # which has another name by now if all went well
        if reasons:
            self.reason = "; ".join(reasons)
            return
        try:
            prune(self._place.folder, self.manifest, self._place.keep, self._place.token)
        except OSError as error:
            self.remark = f"an older checkpoint cannot be removed: {error.filename} ({error.strerror})."

    def _assemble(self, partial: Path) -> list[str]:
        """Make a checkpoint of all ranks' files; return why it did not work."""
        files, reason = self._try(self._write_parts)
        reasons = [] if reason is None else [reason]
        for rank in self._others:
            theirs, reason = self._hear(rank)
            files |= theirs
            reasons += [] if reason is None else [f"rank {rank}: {reason}"]
        if not reasons:
            _, reason = self._try(lambda: self._publish(partial, files))
            reasons = [] if reason is None else [reason]
        return reasons

    def _try(self, work: Callable[[], dict[str, Written]]) -> tuple[dict[str, Written], str | None]:
        """What `work` returns, or why it failed."""
        try:
            return work(), None
        except OSError as error:
            return {}, error.strerror or first_line(error)
        except Exception as error:
            self.defect = error
            return {}, first_line(error)

    def _write_parts(self) -> dict[str, Written]:
        self._memory.wait()
        partial = self._place.partial(self.manifest.iteration)
        (partial / MODEL_FOLDER).mkdir(parents=True, exist_ok=True)
        self._check_room(partial)
        files: dict[str, Written] = {}
        if self._rank == 0:
            files |= self._write_description(partial)
        for part in self._parts:
            part.complete()
            for name, text in part.texts.items():
                files[name] = write_bytes(partial / name, text.encode())
            for name, tensors in part.tensors.items():
                files[name] = write_tensors(partial / name, tensors, part.metadata[name], self._check_given_up)
        return files

    def _check_given_up(self) -> None:
        if self._is_given_up.is_set():
            raise OSError(GIVEN_UP)

    def _write_description(self, partial: Path) -> dict[str, Written]:
        made = partial / MODEL_FOLDER
        self._place.describe(made)
        found = {}
        for path in made.iterdir():
            with path.open("rb") as file:
                content = file.read()
                sync_to_disk(file.fileno())
            found[f"{MODEL_FOLDER}/{path.name}"] = Written(len(content), hashlib.sha256(content).hexdigest())
        return found

    def _check_room(self, partial: Path) -> None:
        """Raise OSError at once where there is no room: a disk that is full for a moment would end the run's record."""
        needed = SPARE_BYTES + sum(
            tensor.nbytes for part in self._parts for tensors in part.tensors.values() for tensor in tensors.values()
        )
        if hasattr(os, "statvfs"):
            disk = os.statvfs(partial)
            if disk.f_blocks and disk.f_bavail * disk.f_frsize < needed:  # some file systems know no blocks
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))

    def _publish(self, partial: Path, files: dict[str, Written]) -> dict[str, Written]:
        self.manifest = Manifest(**{**vars(self.manifest), "files": dict(sorted(files.items()))})
        write_bytes(partial / MANIFEST, self.manifest.text().encode())
        sync_folder(partial / MODEL_FOLDER)
        sync_folder(partial)
        take_name(partial, self._place.folder / step_name(self.manifest.iteration), self._place.token)
        return files

    def _key(self, rank: int) -> str:
        return f"checkpoint/{self._place.token}/{self.manifest.iteration}/{rank}"

    def _tell(self, files: Mapping[str, Written], reason: str | None) -> None:
        told = {"files": {name: asdict(written) for name, written in files.items()}, "reason": reason}
        self._store.set(self._key(self._rank), json.dumps(told))

    def _hear(self, rank: int) -> tuple[dict[str, Written], str | None]:
        key = self._key(rank)
        if not wait_for_key(self._store, key, self._is_given_up):
            return {}, GIVEN_UP
        told = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return {name: Written(**written) for name, written in told["files"].items()}, told["reason"]


def wait_for_key(store: Store, key: str, is_given_up: threading.Event | None = None) -> bool:
    """Wait until a key is in the ranks' store; whether it is, since this `is_given_up` at some time."""
    pause, is_given_up = SHORTEST_POLL, is_given_up or threading.Event()
    while not store.check([key]):  # never a wait, during which some stores serve nobody else
        if is_given_up.wait(pause):
            return False
        pause = min(2 * pause, LONGEST_POLL)
    return True


def take_name(partial: Path, target: Path, token: str) -> None:
    """Give a whole checkpoint its name, in place of one that has it; that one is back where this does not work."""
    old = target.with_name(beside_name(target.name, token, "old"))
    if os.path.lexists(target):
        check_replaceable(target)
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync_folder(target.parent)
    if old.exists():
        with contextlib.suppress(OSError):
            discard(old)
