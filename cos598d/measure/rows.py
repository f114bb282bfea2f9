"""Files of rows: JSON lines that a run only appends to. A resumed run first cuts off those after its checkpoint."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from cos598d.records.schema import read_rows
from cos598d.terminal.files import whole_file

# Calls have rows in the first iterations, and then in every hundredth, so that a long run does not fill the disk.
FIRST_LOGGED, THEN_EVERY = 20, 100


def logs_calls(iteration: int) -> bool:
    """Whether the calls of this iteration get rows of their own, and its row the parts of its phases."""
    return iteration <= FIRST_LOGGED or iteration % THEN_EVERY == 0


class RowFile:
    """A file to which rows are appended. Each is handed to the system at once, so that it survives the process.

    Raises OSError, with the file's name, if the disk refuses.
    """

    def __init__(self, path: Path):
        self.path, self._file = path, open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self.close = self._file.close

    def add(self, row: msgspec.Struct | dict) -> None:
        """Append a row."""
        self._write(msgspec.json.encode(row) + b"\n")

    def writelines(self, lines: Iterable[str]) -> None:
        """Append complete rows."""
        self._write("".join(lines).encode())

    def _write(self, rows: bytes) -> None:
        try:
            self._file.write(rows)
        except OSError as error:
            error.filename = str(self.path)
            raise


class _Place(msgspec.Struct):
    """Where a row belongs: its iteration, or its epoch's last one."""

    iteration: int | None = None
    last_iteration: int | None = None


def cut_after(path: Path, iteration: int) -> int:
    """Drop the rows after an iteration, and an incomplete last one. Return how many iterations are lost."""
    last = iteration
    with path.open("rb") as lines, whole_file(path, "wb") as file:
        for line, place in zip(lines, read_rows(path, _Place), strict=False):
            own = place.last_iteration if place.iteration is None else place.iteration
            last = max(last, own or 0)
            if (own or 0) <= iteration:
                file.write(line)
    return last - iteration
