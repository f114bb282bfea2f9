"""One rank's files of rows in a run's `live/`: opened anew or taken up where a checkpoint knew them, and published."""

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cos598d.measure.live import LiveFile, take_up
from cos598d.records.live import EPOCHS, EVALUATIONS, ITERATIONS, LIVE, MONITOR_ROWS, ROWS
from cos598d.terminal.files import own_folder, sync_folder

Sizes = Mapping[str, int]
PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")


class RankFiles:
    """The files of rows of `rank`, by their names: ROWS, and rank 0's EPOCHS and EVALUATIONS.

    With `sizes` (bytes, by name; of all but EPOCHS, which is written anew) they go on after so many bytes of what
    stands in `folder`'s live/, or else in the folder itself or in those of the run that the checkpoint is of, `others`;
    what follows there is cut off. `is_whole` says whether all those bytes were found.
    """

    def __init__(self, folder: Path, rank: int, sizes: Sizes, others: Sequence[Path]):
        self.folder, self.live = folder, folder / LIVE
        own_folder(self.live)
        self._names = [name.format(rank=rank) for name in (*ROWS, *((EPOCHS, EVALUATIONS) if rank == 0 else ()))]
        self._may_be_none = {name.format(rank=rank) for name in MONITOR_ROWS} | {EVALUATIONS}
        self.by_name: dict[str, LiveFile] = {}
        self.is_whole = True
        for name in self._names:
            begin = bring(folder, name, sizes.get(name, 0), others)
            self.is_whole = self.is_whole and begin == sizes.get(name, 0)
            self.by_name[name] = LiveFile(self.live / name, begin)

    def file(self, name: str) -> LiveFile:
        """The file whose name begins so, up to the rank."""
        return next(file for known, file in self.by_name.items() if known.startswith(name.partition("{")[0]))

    def sizes(self) -> dict[str, int]:
        """Bytes of each file so far, for another's `sizes`."""
        return {name: file.size for name, file in self.by_name.items() if name != EPOCHS}

    def complete(self) -> None:
        """Bring all rows whole to the disk, under their names there."""
        for file in self.by_name.values():
            file.complete()
        sync_folder(self.live)

    def publish(self) -> None:
        """Give the files of rows their names in the run's folder, in place of an earlier run's; epochs stay."""
        for name, file in self.by_name.items():
            if name in self._may_be_none and file.is_empty:
                (self.folder / name).unlink(missing_ok=True)
            elif name != EPOCHS:
                file.publish(self.folder / name)

    def close(self) -> None:
        """Close them; those that have no rows vanish."""
        for file in self.by_name.values():
            file.close()

    def remove(self) -> None:
        """Remove those that are still there, and `live/` with the last of all ranks' files."""
        for file in self.by_name.values():
            file.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.live.rmdir()


def bring(folder: Path, name: str, size: int, others: Sequence[Path]) -> int:
    """Bring the first `size` bytes of a file of rows to `folder`'s live/, and return how many of them are there."""
    places = [folder, *(place for other in others for place in (other / LIVE, other))]
    return take_up(folder / LIVE / name, size, [place / name for place in places])


def row_text(row: Mapping[str, Any] | None) -> str:
    """A row as a line of its file; "" of None."""
    return "" if row is None else json.dumps(row) + "\n"


def bring_departed(
    folder: Path, world_size: int, departed: Mapping[int, Mapping[str, Any]], others: Sequence[Path]
) -> None:
    """Rank 0: of ranks that this world has no more, cut off what came after the checkpoint, as their own would.

    `departed` are the positions that they left. Where there are none, what there is of such ranks is all of attempts
    whose work is lost.
    """
    for path in _rows_of_others(folder / LIVE, world_size):
        if not any(path.name in position["files"] for position in departed.values()):
            path.unlink()
    for rank, position in departed.items():
        sizes = position["files"]
        # By the names that such a rank's files have: those in a checkpoint are anybody's, and could lead elsewhere.
        for name in (row.format(rank=int(rank)) for row in ROWS):
            found = bring(folder, name, sizes.get(name, 0), others)
            if found:
                LiveFile(folder / LIVE / name, found).close()
            else:
                (folder / LIVE / name).unlink(missing_ok=True)
        name = ITERATIONS.format(rank=int(rank))
        if name in sizes and (last := row_text(position.get("row"))):
            with (folder / LIVE / name).open("a") as rows:
                rows.write(last)


def publish_departed(folder: Path, world_size: int) -> None:
    """Rank 0: give the rows of ranks that this world has no more their names in the run's folder."""
    for path in _rows_of_others(folder / LIVE, world_size):
        os.replace(path, folder / path.name)


def remove_published(folder: Path) -> None:
    """Remove what an earlier run left in a folder: its rows and tables, the summary first."""
    for pattern in ("summary.json", EPOCHS, EVALUATIONS, *PREDICTION_FILES, *(name.format(rank="*") for name in ROWS)):
        for old in folder.glob(pattern):
            old.unlink()


def _rows_of_others(live: Path, world_size: int) -> list[Path]:
    patterns = [re.compile(re.escape(name).replace(r"\{rank\}", r"(\d+)")) for name in ROWS]
    found = []
    for path in sorted(live.iterdir()):
        match = next((match for pattern in patterns if (match := pattern.fullmatch(path.name))), None)
        if match and int(match[1]) >= world_size:
            found.append(path)
    return found
