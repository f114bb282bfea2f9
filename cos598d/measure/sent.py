"""What a rank has sent since its last row: sums of its calls, by formula, and the bytes that the kernel has counted."""

from dataclasses import asdict
from typing import Any

from cos598d.comm.ledger import Ledger, Totals
from cos598d.measure.wire import Counters
from cos598d.records.figures import added


class Sent:
    """Sums since the last row. What training sends counts for all of them, what an evaluation sends for its purpose."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._before: dict[str, tuple[int, ...]] = {}  # the ledger's sums by purpose, so far
        self.clear()

    def clear(self) -> None:
        """A row is written: begin again."""
        self.by_purpose: dict[str, list[int]] = {}
        self._totals = asdict(Totals())
        self._predicted = Counters()
        self._counted: Counters | None = Counters()

    def take(self, is_training: bool) -> bool:
        """Add the calls since the last time. Return whether there were any."""
        moved, totals = self._ledger.take()
        for purpose, sums in self._ledger.by_purpose.items():
            before = self._before.get(purpose, (0,) * len(sums))
            if sums != before:
                added(self.by_purpose, {purpose: [now - then for now, then in zip(sums, before, strict=True)]})
        self._before = dict(self._ledger.by_purpose)
        if is_training:
            self._totals = {name: value + self._totals[name] for name, value in asdict(totals).items()}
            self._predicted = self._predicted.plus(Counters(*moved))
        return any(moved)

    def count(self, counted: Counters | None) -> None:
        """Add what the kernel has counted meanwhile. None if that is not known, and then nor is the sum."""
        self._counted = None if counted is None or self._counted is None else self._counted.plus(counted)

    def fields(self) -> dict[str, Any]:
        """The fields of a row of iterations."""
        found: dict[str, Any] = {f"predicted_{name}": value for name, value in self._predicted._asdict().items()}
        found |= {f"counted_{name}": self._counted and getattr(self._counted, name) for name in Counters._fields}
        return self._totals | found | {"by_purpose": self.by_purpose}
