"""What a rank has sent since its last row: sums of its calls, by formula, and the bytes that the kernel has counted."""

from collections.abc import Callable
from typing import Any

from cos598d.comm.ledger import Ledger
from cos598d.measure.wire import Counters
from cos598d.records.conventions import SYNCHRONIZING
from cos598d.records.figures import TOTALS, added


class Sent:
    """Sums since the last row: of all calls by purpose, and of what training sends.

    `counted` gives the kernel's bytes since it was asked last; None if they are not known, and then nor is the sum.
    """

    def __init__(self, ledger: Ledger, counted: Callable[[], Counters | None]):
        self._ledger, self._ask = ledger, counted
        self.clear()

    def clear(self) -> None:
        """A row is written: begin again."""
        self.by_purpose: dict[str, list[int]] = {}
        self._totals, self._predicted = {"all": [0] * len(TOTALS)}, Counters()
        self._counted: Counters | None = Counters()

    def take(self, is_training: bool, always: bool = False) -> None:
        """Add the calls since the last time. The kernel is asked if there were any, or `always`."""
        since = self._ledger.take()
        added(self.by_purpose, since)
        moved = Counters(*(sum(of) for of in list(zip(*since.values(), strict=True))[2:]))
        if not is_training or not (always or any(moved)):
            return
        for purpose in SYNCHRONIZING:
            added(self._totals, {"all": since.get(purpose, [0] * len(TOTALS))})
        self._predicted = self._predicted.plus(moved)
        counted = self._ask()
        self._counted = None if counted is None or self._counted is None else self._counted.plus(counted)

    def fields(self) -> dict[str, Any]:
        """The fields of a row of iterations."""
        predicted = {f"predicted_{name}": value for name, value in self._predicted._asdict().items()}
        counted = {f"counted_{name}": self._counted and getattr(self._counted, name) for name in Counters._fields}
        totals = dict(zip(TOTALS, self._totals["all"], strict=True))
        return totals | predicted | counted | {"by_purpose": self.by_purpose}
