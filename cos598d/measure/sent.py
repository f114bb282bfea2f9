"""What a rank has sent since its last row: sums of its calls, by formula, and the bytes that the kernel has counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cos598d.measure.wire import Counters
from cos598d.records.figures import TOTALS, added, by_purpose, totals
from cos598d.records.schema import Call


class MadeCall(Protocol):
    """A row of the ledger. `started` is by time.perf_counter; `messages` 0 for a collective of the library."""

    iteration: int
    purpose: str
    op: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    payload_bytes: int
    bytes_sent: int
    bytes_received: int
    started: float
    seconds: float | None
    messages: int


class Calls(Protocol):
    """The rows of a ledger that nobody has taken yet, and the iteration to which the next ones belong."""

    rows: list[Any]
    iteration: int


@dataclass
class NoCalls:
    """A ledger that hears nothing."""

    rows: list[Any] = field(default_factory=list)
    iteration: int = 0


class Sent:
    """Sums since the last row. What training sends counts for all of them, what an evaluation sends for its purpose."""

    def __init__(self) -> None:
        self.calls: list[MadeCall] = []
        self.by_purpose: dict[str, list[int]] = {}
        self._totals = dict.fromkeys(TOTALS, 0)
        self._predicted = Counters()
        self._counted: Counters | None = Counters()

    def add(self, calls: Sequence[MadeCall], is_training: bool) -> None:
        """Add calls that were made."""
        self.calls += calls
        added(self.by_purpose, by_purpose(calls))
        if is_training:
            self._totals = {name: value + self._totals[name] for name, value in totals(calls).items()}
            moved = sum(call.bytes_sent for call in calls), sum(call.bytes_received for call in calls)
            self._predicted = self._predicted.plus(Counters(*moved))

    def count(self, counted: Counters | None) -> None:
        """Add what the kernel has counted meanwhile; None if that is not known, and then nor is the sum."""
        self._counted = None if counted is None or self._counted is None else self._counted.plus(counted)

    def fields(self) -> dict[str, Any]:
        """The fields of a row of iterations."""
        found: dict[str, Any] = {f"predicted_{name}": value for name, value in self._predicted._asdict().items()}
        found |= {f"counted_{name}": self._counted and getattr(self._counted, name) for name in Counters._fields}
        return self._totals | found | {"by_purpose": self.by_purpose}


def call_row(call: MadeCall, began: float | None) -> Call:
    """A ledger's row for the file. `began` is when the iteration began; None before training."""
    return Call(
        call.iteration,
        call.purpose,
        call.op,
        call.tensor,
        list(call.shape),
        call.dtype,
        call.payload_bytes,
        call.bytes_sent,
        call.bytes_received,
        None if call.seconds is None else round(call.seconds, 9),
        call.messages or None,
        None if began is None else round(call.started - began, 9),
    )
