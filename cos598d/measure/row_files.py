"""A rank's files of rows in a run's `live/`: readable during the run, and continued from a checkpoint."""

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cos598d.measure.claim import PREDICTION_FILES
from cos598d.records.conventions import EPOCHS, EVALUATIONS, ITERATIONS, LIVE, MONITOR_ROWS, ROWS
from cos598d.terminal.files import names_errors, open_own, own_folder, sync_folder, sync_to_disk, whole_file
from cos598d.terminal.reading import open_plain

# A disk that is full now may have room soon, for example when a checkpoint that did not fit is removed.
FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 16 * 2**20  # bytes of rows that wait for room
LONGEST_ROW = 16 * 2**20  # bytes
_RANK = re.compile("|".join(re.escape(name).replace(r"\{rank\}", r"(\d+)") for name in ROWS))


class RowFile:
    """A growing text file of complete rows: each write goes to the system at once, so that it survives the process.

    If the file exists, it must be a plain one (see `open_own`), and its first `begin` bytes are kept. While the disk is
    full, up to MOST_WAITING bytes wait in memory; more, or `complete`, raise OSError. Every OSError names `path`.
    Threads may share it.
    """

    def __init__(self, path: Path, begin: int = 0):
        self.path = path
        self._lock = threading.Lock()
        self._waiting = b""
        with names_errors(self.path):
            self._descriptor = open_own(path)
            os.ftruncate(self._descriptor, begin)
            self._size = os.lseek(self._descriptor, 0, os.SEEK_END)

    @property
    def size(self) -> int:
        """Bytes of all rows so far, including waiting ones."""
        with self._lock:
            return self._size + len(self._waiting)

    def write(self, text: str) -> None:
        """Append complete rows."""
        with self._lock, names_errors(self.path):
            self._waiting += text.encode()
            try:
                self._hand_over()
            except OSError as error:
                if error.errno not in FULL or len(self._waiting) > MOST_WAITING:
                    raise

    def writelines(self, lines: Iterable[str]) -> None:
        """Append complete rows."""
        self.write("".join(lines))

    def replace_last(self, size: int, text: str) -> None:
        """Replace the last row, of `size` bytes, by `text`, a complete row."""
        with self._lock, names_errors(self.path):
            kept = max(0, len(self._waiting) - size)
            self._size -= size - (len(self._waiting) - kept)
            self._waiting = self._waiting[:kept]
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
        self.write(text)

    def complete(self) -> None:
        """Sync everything to the disk; a full one raises here at the latest. Other threads may write meanwhile."""
        with names_errors(self.path):
            with self._lock:
                self._hand_over()
                descriptor = os.dup(self._descriptor)
            try:
                sync_to_disk(descriptor)  # over a network, or with a quota, a full disk raises only here
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Close the file. Rows that could not be written yet are lost."""
        with self._lock, contextlib.suppress(OSError):
            if self._descriptor >= 0:
                try:
                    self._hand_over()
                finally:
                    os.close(self._descriptor)
                    self._descriptor = -1

    def _hand_over(self) -> None:
        """Give the system the waiting rows, as many as fit on the disk."""
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            self._size += written
            self._waiting = self._waiting[written:]


class RankFiles:
    """The files of rows of `rank`, by their names without the rank: ROWS, and rank 0's EPOCHS and EVALUATIONS.

    With `sizes` (bytes, by file name; EPOCHS is written again) each continues after that many bytes. They come from
    `folder`'s live/, from the folder itself, or from those of the checkpoint's run, `others`. The rest of such a file
    is cut off. `is_whole`: whether all those bytes were found.
    """

    def __init__(self, folder: Path, rank: int, sizes: Mapping[str, int], others: Sequence[Path]):
        self.folder, self.live = folder, folder / LIVE
        own_folder(self.live)
        self.by_name: dict[str, RowFile] = {}
        self.is_whole = True
        for name in (*ROWS, *((EPOCHS, EVALUATIONS) if rank == 0 else ())):
            file = name.format(rank=rank)
            begin = take_up(folder, file, sizes.get(file, 0), others)
            self.is_whole = self.is_whole and begin == sizes.get(file, 0)
            self.by_name[name] = RowFile(self.live / file, begin)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file so far, for the `sizes` of another instance."""
        return {file.path.name: file.size for name, file in self.by_name.items() if name != EPOCHS}

    def complete(self) -> None:
        """Sync all rows to the disk, under their names there."""
        for file in self.by_name.values():
            file.complete()
        sync_folder(self.live)

    def publish(self) -> None:
        """Give the files of rows their final names in the run's folder, replacing an earlier run's; epochs stay."""
        for name, file in self.by_name.items():
            target = self.folder / file.path.name
            if name in (*MONITOR_ROWS, EVALUATIONS) and not file.size:
                target.unlink(missing_ok=True)
            elif name != EPOCHS:
                file.complete()
                os.replace(file.path, target)

    def close(self) -> None:
        """Close the files."""
        for file in self.by_name.values():
            file.close()

    def remove(self) -> None:
        """Remove the files that are still there, and `live/` after the last of all ranks' files."""
        for file in self.by_name.values():
            file.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.live.rmdir()


def take_up_departed(
    folder: Path, world_size: int, departed: Mapping[int, tuple[Mapping[str, int], str]], others: Sequence[Path]
) -> None:
    """On rank 0: for ranks that this world does not have, cut off what came after the checkpoint, as they would.

    `departed` has by rank the bytes of its files, and its last row, which is in the checkpoint. Rows of other such
    ranks are removed: they come from attempts whose work is lost.
    """
    for path in rows_of_others(folder / LIVE, world_size):
        if not any(path.name in sizes for sizes, _ in departed.values()):
            path.unlink()
    for rank, (sizes, last) in departed.items():
        # By this package's names for such files: names in a checkpoint may be anybody's, and could lead elsewhere.
        for name in (row.format(rank=rank) for row in ROWS):
            file = RowFile(folder / LIVE / name, take_up(folder, name, sizes.get(name, 0), others))
            if name in sizes and name == ITERATIONS.format(rank=rank):
                file.write(last)
            file.close()
            if not file.size:
                file.path.unlink()


def rows_of_others(live: Path, world_size: int) -> Iterator[Path]:
    """The files of rows of ranks that this world does not have."""
    for path in sorted(live.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match and int(next(filter(None, match.groups()))) >= world_size:
            yield path


def remove_published(folder: Path) -> None:
    """Remove an earlier run's rows and tables from a folder, the summary first."""
    for pattern in ("summary.json", EPOCHS, EVALUATIONS, *PREDICTION_FILES, *(name.format(rank="*") for name in ROWS)):
        for old in folder.glob(pattern):
            old.unlink()


def take_up(folder: Path, name: str, size: int, others: Iterable[Path]) -> int:
    """Put the first `size` bytes of a file of rows into `folder`'s live/, and return how many bytes of them are there.

    They are there already, or are copied from the folder or the first of `others` that has them. If none has all of
    them, the complete rows of live/ stay; none of them, if the file is another run's, whose rows do not end there. A
    file with another hard link is copied first.
    """
    path = folder / LIVE / name
    for place in (path, folder / name, *(place / name for other in others for place in (other / LIVE, other))):
        if _has_rows(place, size):
            if place != path or place.stat().st_nlink > 1:
                _copy(place, path, size)
            return size
    found = _whole_rows(path, size)
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        _copy(path, path, found)
    return found


def last_row(path: Path, end: int) -> bytes:
    """The row of a file that ends at byte `end`. Raises OSError, also if it is longer than any row of ours."""
    with open_plain(path, "rb", follows=False) as rows:
        size, found = 2**12, b""
        while True:
            begin = max(0, end - size)
            rows.seek(begin)
            found = rows.read(end - begin)
            place = found.rfind(b"\n", 0, len(found) - 1)
            if place >= 0 or begin == 0:
                return found[place + 1 :]
            if size > LONGEST_ROW:
                raise OSError(errno.EFBIG, "it has a row of another program", str(path))
            size *= 4


def _copy(source: Path, path: Path, size: int) -> None:
    """Copy the first `size` bytes of a file of rows to a new file `path`, and sync it to the disk."""
    with open_plain(source, "rb", follows=False) as rows, whole_file(path, "wb") as target:
        left = size
        while part := rows.read(min(left, 2**20)):
            target.write(part)
            left -= len(part)
        target.flush()
        sync_to_disk(target.fileno())


def _has_rows(path: Path, size: int) -> bool:
    """Whether a file has at least `size` bytes, and a row ends there."""
    try:
        with open_plain(path, "rb", follows=False) as rows:
            if os.fstat(rows.fileno()).st_size < size:
                return False
        return size == 0 or last_row(path, size).endswith(b"\n")
    except OSError:
        return False


def _whole_rows(path: Path, most: int) -> int:
    """Bytes of the complete rows among the first `most` of a shorter file; 0 if they do not fit."""
    try:
        size = path.stat().st_size
        if size >= most or size == 0:
            return 0
        row = last_row(path, size)
    except OSError:
        return 0
    return size if row.endswith(b"\n") else size - len(row)
