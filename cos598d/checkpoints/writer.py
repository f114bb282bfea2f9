"""A checkpoint being written to the disk, in a thread of its own while the training continues.

Every rank that sees rank 0's folder does this at once, into a hidden folder in it:

1. It writes its part (rank 0 also the parts of ranks that do not see the folder), and hashes it meanwhile. It waits
   until each file is on the disk, and the rows of the record to which the part refers.
2. It reports the files' sizes and digests to rank 0 through the ranks' store, or why it failed. It uses no file, which
   would not fit on a full disk.
3. Rank 0 waits for all, writes the manifest, gives the folder its name, and removes old checkpoints.

If it is killed at any moment, the older checkpoints stay as they were. At most a hidden folder remains, which the next
attempt removes.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch.distributed import Store

from cos598d.checkpoints.folder import PARTIAL, hidden_name, prune, take_name
from cos598d.checkpoints.layout import (
    FORMAT,
    MANIFEST,
    MODEL_FOLDER,
    Manifest,
    Written,
    step_name,
    write_bytes,
    write_tensors,
)
from cos598d.checkpoints.snapshot import CheckpointPart, HostMemory
from cos598d.errors import first_line
from cos598d.terminal.files import sync_folder, sync_to_disk, unfinished

SPARE_BYTES = 1 << 20  # room that a checkpoint leaves on the disk for the run's record
SHORTEST_POLL, LONGEST_POLL = 0.005, 0.1  # seconds between two checks for the other ranks' reports
GIVEN_UP = "given up"
GIVE_UP_SECONDS = 5.0  # a disk that does not answer must not keep a process from ending
NICENESS = 10  # the training's threads have priority


@dataclass(frozen=True)
class SharedFolder:
    """Where this attempt of a run writes its checkpoints, and which ranks do.

    token: unique to this attempt. run: equal in all checkpoints of the run. keep: how many checkpoints are kept.
    describe: writes what a model's folder needs next to the weights (configuration, vocabulary) into the given folder;
        rank 0's writing thread calls it. rank: this one. near: the ranks other than rank 0 that see the folder.
    far: those whose parts rank 0 writes. store: the ranks' store.
    """

    folder: Path
    token: str
    run: str
    keep: int
    describe: Callable[[Path], None]
    rank: int
    near: Sequence[int]
    far: Sequence[int]
    store: Store

    def key(self, *words: str | int) -> str:
        """A key of this attempt in the ranks' store."""
        return "/".join(map(str, ("checkpoint", self.token, *words)))


class PartReport(msgspec.Struct):
    """What a rank wrote; `reason`: why it could not."""

    files: dict[str, Written] = {}
    reason: str | None = None


class Writing(threading.Thread):
    """A checkpoint that is being written. `join` waits for this rank's part, on rank 0 for all of it.

    After that, `reason` is None if it is complete, else why it is not. `remark` is what else failed. Both are set on
    rank 0, which then sets `ended_key` in the ranks' store. `defect` is an error, on any rank, that no disk caused.
    """

    reason: str | None = None
    remark: str | None = None
    defect: Exception | None = None

    def __init__(
        self,
        place: SharedFolder,
        number: int,
        iteration: int,
        is_best: bool,
        parts: Sequence[CheckpointPart],
        memory: HostMemory,
    ):
        """It is save `number` of this attempt. Rank 0 gets its own and the far ranks' parts; a near rank its own."""
        super().__init__(name=f"checkpoint {iteration}", daemon=True)
        self.iteration, self.ended_key = iteration, place.key(number, "ended")
        self._place, self._number, self._is_best = place, number, is_best
        self._parts, self._memory = parts, memory
        self._partial = place.folder / hidden_name(step_name(iteration), place.token, PARTIAL)
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """Stop soon, and remove what exists. Do not wait for other ranks, which may be lost."""
        self._is_given_up.set()
        self.join(GIVE_UP_SECONDS)

    def run(self) -> None:
        """Write; never raises."""
        if sys.platform == "linux":  # elsewhere it would apply to the whole process
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            if self._place.rank == 0:
                self._lead()
            else:
                report = msgspec.json.encode(self._try(self._write_parts)).decode()
                self._place.store.set(self._place.key(self._number, self._place.rank), report)
        except Exception as error:  # the store is lost, and so are the ranks, or soon will be
            self.defect = error
        self._parts = ()
        if self._place.rank == 0:
            with contextlib.suppress(Exception):  # the same
                self._place.store.set(self.ended_key, "")

    def _lead(self) -> None:
        """Make a checkpoint of all ranks' files."""
        with unfinished(self._partial):
            try:
                reports = {0: self._try(self._write_parts)} | {rank: self._hear(rank) for rank in self._place.near}
                if all(report.reason is None for report in reports.values()):
                    files = {name: each for report in reports.values() for name, each in report.files.items()}
                    reports[0] = self._try(lambda: self._publish(files))
            finally:
                shutil.rmtree(self._partial, ignore_errors=True)  # it has another name by now if all went well
        reasons = [
            f"rank {rank}: {report.reason}" if rank else report.reason
            for rank, report in reports.items()
            if report.reason is not None
        ]
        self.reason = "; ".join(reasons) or None

    def _try(self, work: Callable[[], dict[str, Written]]) -> PartReport:
        """What `work` wrote, or why it failed."""
        try:
            return PartReport(work())
        except OSError as error:
            return PartReport(reason=error.strerror or first_line(error))
        except Exception as error:
            self.defect = error
            return PartReport(reason=first_line(error))

    def _write_parts(self) -> dict[str, Written]:
        self._memory.wait()
        (self._partial / MODEL_FOLDER).mkdir(parents=True, exist_ok=True)
        self._check_room()
        files = self._write_description() if self._place.rank == 0 else {}
        for part in self._parts:
            part.complete()
            for name, text in part.texts.items():
                files[name] = write_bytes(self._partial / name, text.encode())
            for name, tensors in part.tensors.items():
                files[name] = write_tensors(self._partial / name, tensors, part.metadata[name], self._check_given_up)
        return files

    def _check_given_up(self) -> None:
        if self._is_given_up.is_set():
            raise OSError(GIVEN_UP)

    def _write_description(self) -> dict[str, Written]:
        made = self._partial / MODEL_FOLDER
        self._place.describe(made)
        found = {}
        for path in made.iterdir():
            with path.open("rb") as file:
                content = file.read()
                sync_to_disk(file.fileno())
            found[f"{MODEL_FOLDER}/{path.name}"] = Written(len(content), hashlib.sha256(content).hexdigest())
        return found

    def _check_room(self) -> None:
        """Raise OSError at once if there is no room: a briefly full disk would end the run's record."""
        tensors = [tensor for part in self._parts for named in part.tensors.values() for tensor in named.values()]
        needed = SPARE_BYTES + sum(tensor.nbytes for tensor in tensors)
        if hasattr(os, "statvfs"):
            disk = os.statvfs(self._partial)
            if disk.f_blocks and disk.f_bavail * disk.f_frsize < needed:  # some file systems report no blocks
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._partial))

    def _publish(self, files: dict[str, Written]) -> dict[str, Written]:
        """Write the manifest, give the folder its name, and remove older checkpoints."""
        place, files = self._place, dict(sorted(files.items()))
        world_size = 1 + len(place.near) + len(place.far)
        manifest = Manifest(FORMAT, place.run, self.iteration, world_size, self._is_best, files)
        write_bytes(self._partial / MANIFEST, manifest.text().encode())
        sync_folder(self._partial / MODEL_FOLDER)
        sync_folder(self._partial)
        take_name(self._partial, place.folder / step_name(self.iteration), place.token)
        try:
            prune(place.folder, manifest, place.keep, place.token)
        except OSError as error:
            self.remark = f"an older checkpoint cannot be removed: {error.filename} ({error.strerror})."
        return files

    def _hear(self, rank: int) -> PartReport:
        """A near rank's report on its part."""
        key, store = self._place.key(self._number, rank), self._place.store
        if not wait_for_key(store, key, self._is_given_up):
            return PartReport(reason=GIVEN_UP)
        report = msgspec.json.decode(store.get(key), type=PartReport)
        store.delete_key(key)
        return report


def wait_for_key(store: Store, key: str, is_given_up: threading.Event | None = None) -> bool:
    """Wait until a key is in the ranks' store. Return False if `is_given_up` was set meanwhile."""
    pause, is_given_up = SHORTEST_POLL, is_given_up or threading.Event()
    while not store.check([key]):  # polling: during a blocking wait, some stores serve nobody else
        if is_given_up.wait(pause):
            return False
        pause = min(2 * pause, LONGEST_POLL)
    return True
