"""A rank's rows of iterations as they grow: each is written at once, and summed when the next one begins."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cos598d.comm.ledger import Totals
from cos598d.measure.row_files import RowFile
from cos598d.measure.thinning import AUTO, Detail
from cos598d.measure.wire import Counters
from cos598d.records.conventions import PHASES
from cos598d.records.figures import RankSums

Row = dict[str, Any]


class IterationRows:
    """One rank's rows in `file`, thinned by `detail`, and the sums of all of them, thinned or not.

    The bytes and the time until the next iteration are added to the last row. It is in the file already, and in a
    checkpoint too, since the run may resume from there several times.
    """

    def __init__(self, file: RowFile, detail: Detail):
        self._file, self._detail = file, detail
        self._sums = RankSums()  # of the rows before the last
        self._last: Row | None = None
        self._last_size = 0  # in the file
        self._moment: float | None = None  # end of the wall time in the rows so far; None while training pauses

    def begin(self) -> None:
        """Start the wall time: training begins, or continues after an evaluation. Does nothing if it runs."""
        if self._moment is None:
            self._moment = time.perf_counter()

    def pause(self) -> None:
        """Stop the wall time. What came after the last iteration belongs to its epoch too."""
        if self._last and self._moment is not None:
            self._last["wall_seconds_after"] += time.perf_counter() - self._moment
        self._moment = None

    def add(
        self,
        facts: Row,
        seconds: float,
        phases: Mapping[str, float],
        moved: tuple[int, int],
        totals: Totals,
        counted: Counters | None,
        counts: Mapping[str, int],
    ) -> Row:
        """Add an iteration: bytes sent and received by formula (`moved`) and by the kernel, synchronizing calls, and
        its examples' tokens or images. Return its row. Raises OSError."""
        now = time.perf_counter()
        wall, self._moment = now - (now if self._moment is None else self._moment), now
        timed = {"seconds": seconds, **{f"seconds_{phase}": phases[phase] for phase in PHASES}, "wall_seconds": wall}
        row = facts | {name: round(value, 9) for name, value in timed.items()}
        row |= {"predicted_bytes_sent": moved[0], "predicted_bytes_received": moved[1]}
        row |= {f"counted_{name}": counted and getattr(counted, name) for name in Counters._fields}
        row |= asdict(totals) | {"wall_seconds_after": 0.0, **counts}
        if "spans_seconds" in row:
            spans = row["spans_seconds"]
            row["spans_seconds"] = [[name, round(begin, 9), round(length, 9)] for name, begin, length in spans]
        if self._last:
            self._sums.add(self._last)
        self._last = row
        text = row_text(self._detail.of_row(row, is_new=True))
        self._last_size = len(text)
        self._file.write(text)
        return row

    def add_to_last(self, moved: tuple[int, int], totals: Totals, counted: Counters | None) -> None:
        """Add what was sent since the last iteration to its row. Raises OSError."""
        row = self._last
        if row is None:
            return
        more = asdict(totals) | {"predicted_bytes_sent": moved[0], "predicted_bytes_received": moved[1]}
        row |= {name: row[name] + value for name, value in more.items()}
        for name in Counters._fields:
            before = row[f"counted_{name}"]
            row[f"counted_{name}"] = None if before is None or counted is None else before + getattr(counted, name)
        if text := row_text(self._detail.of_row(row)):
            self._file.replace_last(self._last_size, text)
            self._last_size = len(text)

    def sums(self) -> RankSums:
        """The sums of all rows so far."""
        return sums_at(self.position())

    def position(self) -> dict[str, Any]:
        """The sums and the last row (JSON), for `resume`, where its file is shorter by that row."""
        return {"sums": self._sums.table, "row": self._last, "detail": self._detail.position()}

    @property
    def size(self) -> int:
        """Bytes of the rows before the last."""
        return self._file.size - self._last_size

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue from there. Raises OSError."""
        self._sums = RankSums(position["sums"])
        self._last = position["row"] and dict(position["row"])
        self._detail.resume(position["detail"])
        text = last_text(position)
        self._last_size = len(text)
        self._file.write(text)


def row_text(row: Mapping[str, Any] | None) -> str:
    """A row as a line of its file; "" for None."""
    return "" if row is None else json.dumps(row) + "\n"


def last_text(position: Mapping[str, Any]) -> str:
    """The last row of a rank's iterations at a position, as in its file; "" if it is left out there."""
    detail = Detail(AUTO, 0, 1)
    detail.resume(position["detail"])
    return row_text(position["row"] and detail.of_row(position["row"]))


def sums_at(position: Mapping[str, Any]) -> RankSums:
    """The sums of all rows at a position."""
    sums = RankSums(position["sums"])
    if position["row"]:
        sums.add(position["row"])
    return sums
