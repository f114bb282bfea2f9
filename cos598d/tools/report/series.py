"""Rank 0's rows for a page: columns of numbers, and all details of one typical iteration."""

from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cos598d.errors import UserError
from cos598d.records.conventions import WARM_UP
from cos598d.records.old_schema import MOST_ROW, not_whole, parse_row, too_long
from cos598d.records.run import CALL, ITERATION, REMEDY, read_table, reading
from cos598d.terminal.reading import MOST_BYTES, lines_of, open_plain

Row = Mapping[str, Any]
_BEGIN, _END = b'{"iteration": ', b"}\n"  # of a row as a ledger writes it


class Stretch(NamedTuple):
    """Adjacent lines of a file: the number of the first, and the bytes at which they begin and end."""

    line: int
    begin: int
    end: int


Calls = dict[int, list[Stretch]]


class Series:
    """The iterations of a run in order, 8 bytes per number: `iterations`, `losses`, `seconds`, `examples`, and `rates`,
    the learning rates. The last two are empty if the rows do not have them, as in older records.

    `typical` is the row nearest to the median of the seconds, without the warm-up if there are others. In a long run
    not every iteration has its spans and its calls: it is the nearest of those that have both. None without iterations.
    """

    def __init__(self, path: Path, calls: Calls, grows: bool = False):
        self.iterations, self.losses, self.seconds, self.rates = array("q"), array("d"), array("d"), array("d")
        self.examples = array("q")
        has_spans = bytearray()
        for row in read_table(path, ITERATION, grows=grows):
            self.iterations.append(row["iteration"])
            self.losses.append(row["loss"])
            self.seconds.append(row["seconds"])
            has_spans.append(bool(row.get("spans_seconds")))
            if "learning_rate" in row:
                self.rates.append(row["learning_rate"])
            if "examples" in row:
                self.examples.append(row["examples"])
        if len(self.rates) < len(self.iterations):
            self.rates = array("d")
        if len(self.examples) < len(self.iterations):
            self.examples = array("q")
        place = self._typical_place(has_spans, calls)
        self.typical: Row | None = None
        if place is not None:
            with reading(path), open_plain(path) as lines:
                self.typical = parse_row(next(islice(lines, place, None)), ITERATION, path, REMEDY, place + 1)

    def __len__(self) -> int:
        return len(self.iterations)

    def _typical_place(self, has_spans: Sequence[int], calls: Calls) -> int | None:
        places = range(WARM_UP if len(self) > WARM_UP else 0, len(self))
        ranked = sorted(places, key=lambda place: self.seconds[place])
        middle = (len(ranked) - 1) // 2
        # First the more complete, then the nearer to the middle, then the earlier.
        order = [
            (-has_spans[place] - (has_spans[place] and self.iterations[place] in calls), abs(number - middle), place)
            for number, place in enumerate(ranked)
        ]
        return min(order)[-1] if order else None


def find_calls(path: Path, grows: bool = False) -> Calls:
    """The positions of each iteration's rows in a ledger's file. Raises UserError for an invalid row.

    It reads only a row's beginning and end, since a file may have millions of rows.
    """
    found: Calls = {}
    with reading(path, is_needed=not grows), open_plain(path, "rb") as lines:
        begin = 0
        for number, line in enumerate(lines_of(lines, MOST_ROW), start=1):
            if len(line) == MOST_ROW:
                raise too_long(path, number, REMEDY)
            end = begin + len(line)
            digits = line[len(_BEGIN) : line.find(b",")]
            if line.startswith(_BEGIN) and line.endswith(_END) and digits.isdigit() and len(digits) < 19:
                iteration = int(digits)
            elif line.endswith(b"\n"):
                iteration = parse_row(line.decode("utf-8", "replace"), CALL, path, REMEDY, number)["iteration"]
            elif grows:
                break
            else:
                raise not_whole(path, number, REMEDY)
            stretches = found.setdefault(iteration, [])
            if stretches and stretches[-1].end == begin:
                stretches[-1] = stretches[-1]._replace(end=end)
            else:
                stretches.append(Stretch(number, begin, end))
            begin = end
    return found


def read_calls(path: Path, stretches: Sequence[Stretch]) -> list[Row]:
    """These rows of a ledger's file. Raises UserError for a damaged one."""
    found = []
    with reading(path), open_plain(path, "rb") as rows:
        for stretch in stretches:
            if stretch.end - stretch.begin > MOST_BYTES:
                raise UserError(
                    f"{path}, line {stretch.line} begins an iteration of more than {MOST_BYTES >> 20} MiB, so it is "
                    f"damaged. {REMEDY}."
                )
            rows.seek(stretch.begin)
            text = rows.read(stretch.end - stretch.begin).decode("utf-8", "replace")
            for number, line in enumerate(text.splitlines(), start=stretch.line):
                found.append(parse_row(line, CALL, path, REMEDY, number))
    return found
