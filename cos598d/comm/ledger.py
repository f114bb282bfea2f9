"""The ledger: one row for every collective call that a rank really made, with the bytes that it sent and received."""

import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Protocol

import torch

from cos598d.comm.timers import Timer, Timestamp
from cos598d.records.conventions import SYNCHRONIZING

BEFORE_TRAINING = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One collective call of one rank.

    `iteration` counts from 1; 0 is before training. A call belongs to the iteration in which it ended; after an
    iteration's end, to that one until the next begins. `payload_bytes` is the tensor's size. `bytes_sent` and
    `bytes_received` are this rank's bytes by the algorithm's formula, rounded to a byte. `seconds` is from the call to
    its completion; for a call that overlaps other work, to the end of the wait for it; None if a library makes the call
    and does not report it. On CUDA both are timestamps of the computing stream: when it reached the call, and when it
    continued after waiting. `seconds` is None until the ledger's `settle`. `messages` is how many this rank sent, for a
    sync's own collective; None for the library's collectives. `started` is in seconds since the iteration began. It is
    None before training, and if `seconds` is. It is negative for a call that was started before the iteration.
    """

    iteration: int
    purpose: str
    op: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    payload_bytes: int
    bytes_sent: int
    bytes_received: int
    seconds: float | None
    messages: int | None = None
    started: float | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over one iteration's synchronizing calls: of gradients, or of weights that are held in shards.

    A tensor that is sent in several calls (gathered, then scattered) counts once in `tensors` and `payload_bytes`.
    """

    calls: int = 0
    tensors: int = 0
    payload_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def plus(self, other: "Totals") -> "Totals":
        """The sum, field by field."""
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Output(Protocol):
    """Anything with writelines(), such as a text file."""

    def writelines(self, lines: Iterable[str], /) -> None:
        """Append the lines."""


class RowFilter(Protocol):
    """Decides which iterations' rows are written."""

    def keeps(self, iteration: int, /) -> bool:
        """Whether to write the rows of this iteration."""

    def wrote(self, rows: int, /) -> None:
        """Called after this number of rows has been written."""


class Ledger:
    """Rows in the order of the calls. `flush` writes them as JSON lines, and sums are kept.

    The loop calls `begin` for each iteration. Without `output`, the rows of all iterations stay in `rows`. With it,
    only two sums are kept: since the last `take`, and in `by_purpose` of all rows. Both include rows that the `keeper`
    does not write.
    """

    def __init__(self, output: Output | None = None, keeper: RowFilter | None = None):
        self.iteration = BEFORE_TRAINING
        self.rows: list[Row] = []
        # By purpose: calls, bytes of payload, bytes sent, bytes received.
        self.by_purpose: dict[str, tuple[int, int, int, int]] = {}
        self.entered = self.written = 0  # rows flushed so far, and how many of them were written
        self._output, self._keeper = output, keeper
        self._flushed: dict[int, Totals] = {}
        self._moved = (0, 0)  # bytes sent and received by rows that were flushed since the last `take`
        self._began: Timestamp = None
        # Rows whose end the device may not have reached: index, timer, begin of the iteration, start and end of the
        # call.
        self._unsettled: list[tuple[int, Timer, Timestamp, Timestamp, Timestamp]] = []

    def begin(self, iteration: int, began: Timestamp) -> None:
        """Begin `iteration`, to which the next rows belong. The device reached its begin at the timestamp `began`."""
        self.iteration, self._began = iteration, began

    def enter(self, row: Row) -> None:
        """Add one call whose seconds are final, or will never be known."""
        self.rows.append(row)

    def enter_call(self, facts: dict[str, Any], time: Timer, started: Timestamp, ended: Timestamp) -> None:
        """Add a call that has ended, from a row's fields without its iteration and times.

        Its iteration is the current one, since the one in which it started may be over and summed up. Its times come
        from two timestamps of `time`.
        """
        if time.is_at_once:
            self.rows.append(Row(self.iteration, **facts, **_times(time, self._began, started, ended)))
            return
        self._unsettled.append((len(self.rows), time, self._began, started, ended))
        self.rows.append(Row(self.iteration, **facts, seconds=None))

    def settle(self) -> None:
        """Set the seconds of all rows. The host waits until the device has reached the end of each call."""
        for place, time, began, started, ended in self._unsettled:
            time.wait(ended)
            self.rows[place] = replace(self.rows[place], **_times(time, began, started, ended))
        self._unsettled = []

    def forget(self) -> None:
        """Drop the rows entered since the last flush."""
        self.rows, self._unsettled = [], []

    def flush(self) -> None:
        """Write the rows since the last flush and drop them. Called between iterations, outside of any timed phase."""
        if self._output is None or not self.rows:
            return
        self.settle()
        kept = [row for row in self.rows if self._keeper is None or self._keeper.keeps(row.iteration)]
        self._output.writelines(json.dumps(_shortened(row)) + "\n" for row in kept)
        if self._keeper:
            self._keeper.wrote(len(kept))
        self.entered += len(self.rows)
        self.written += len(kept)
        for row in self.rows:
            calls, payload, sent, received = self.by_purpose.get(row.purpose, (0, 0, 0, 0))
            moved = (payload + row.payload_bytes, sent + row.bytes_sent, received + row.bytes_received)
            self.by_purpose[row.purpose] = (calls + 1, *moved)
            self._moved = (self._moved[0] + row.bytes_sent, self._moved[1] + row.bytes_received)
        self._flushed = self.totals_by_iteration()
        self.rows = []

    def totals_by_iteration(self) -> dict[int, Totals]:
        """The synchronizing calls summed by iteration, over flushed and unflushed rows."""
        found = dict(self._flushed)
        for iteration, total in _sums(self.rows).items():
            found[iteration] = found.get(iteration, Totals()).plus(total)
        return found

    def take(self) -> tuple[tuple[int, int], Totals]:
        """Flush, and return the sums since the last `take`: bytes sent and received, and the synchronizing calls."""
        self.flush()
        moved, found = self._moved, self._flushed
        self._moved, self._flushed = (0, 0), {}
        return moved, functools.reduce(Totals.plus, found.values(), Totals())

    def position(self) -> dict[str, Any]:
        """The sums of all rows so far (JSON), for `resume`."""
        return {"by_purpose": self.by_purpose, "entered": self.entered, "written": self.written}

    def resume(self, position: dict[str, Any]) -> None:
        """Continue from the result of `position`."""
        self.by_purpose = {purpose: (*sums,) for purpose, sums in position["by_purpose"].items()}
        self.entered, self.written = position["entered"], position["written"]


_NAMES = tuple(field.name for field in fields(Row))


def _shortened(row: Row) -> dict[str, Any]:
    """A row for the file: seconds are rounded to nanoseconds, the clocks' resolution."""
    found = {name: getattr(row, name) for name in _NAMES}
    for name in ("seconds", "started"):
        if found[name] is not None:
            found[name] = round(found[name], 9)
    return found


def _times(time: Timer, began: Timestamp, started: Timestamp, ended: Timestamp) -> dict[str, Any]:
    """The times of a call that ended in an iteration which `began` at that timestamp (None: before the first)."""
    return {
        "seconds": time.seconds(started, ended),
        "started": None if began is None else time.seconds(began, started),
    }


def _sums(rows: Iterable[Row]) -> dict[int, Totals]:
    gradients: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.purpose in SYNCHRONIZING:
            gradients[row.iteration].append(row)
    return {iteration: _total(calls) for iteration, calls in gradients.items()}


def _total(calls: list[Row]) -> Totals:
    # A tensor may be sent in pieces (take the sum) and in several ways, such as out and back (take the largest).
    by_op: dict[tuple[str, str], int] = defaultdict(int)
    for row in calls:
        by_op[row.tensor, row.op] += row.payload_bytes
    payloads: dict[str, int] = defaultdict(int)
    for (tensor, _), payload in by_op.items():
        payloads[tensor] = max(payloads[tensor], payload)
    return Totals(
        calls=len(calls),
        tensors=len(payloads),
        payload_bytes=sum(payloads.values()),
        bytes_sent=sum(row.bytes_sent for row in calls),
        bytes_received=sum(row.bytes_received for row in calls),
    )


def size_in_bytes(tensor: torch.Tensor) -> int:
    """The payload of a tensor: the bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as "float32"."""
    return str(dtype).removeprefix("torch.")
