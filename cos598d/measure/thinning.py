"""Which iterations' rows are kept in detail, so that a long run does not fill the disk: totals know of all of them."""

from typing import Any

from cos598d.records.ledger_rule import ALL, AUTO, LedgerRule

# How many rows all ranks of a run keep together by the rule `auto`; with the longest names a call's has some 350 bytes.
MOST_CALLS, MOST_ROWS = 200_000, 30_000
RARER = 10  # times as rare, each time that all but a quarter of what was left is spent


class Thinning:
    """Decides of one iteration after the other, in their order, whether its rows are kept.

    By `auto` all are, until three quarters of the `most` rows are written; then those of every 10th iteration, until
    three quarters of the rest are; then of every 100th, and so on: the later the rarer, and never more than `most`
    but for the last one's. The same run decides alike whenever it is interrupted, and whatever its seconds are.
    """

    def __init__(self, rule: LedgerRule, most: int):
        self._rule, self._most = rule, most
        self._written = 0
        self._last, self._keeps = -1, True

    def keeps(self, iteration: int) -> bool:
        """Whether the rows of `iteration` are kept: the same answer until the next one."""
        if iteration != self._last:
            self._last, self._keeps = iteration, self._decide(iteration)
        return self._keeps

    def wrote(self, rows: int) -> None:
        """So many rows have been written."""
        self._written += rows

    def _decide(self, iteration: int) -> bool:
        if self._rule.name != AUTO:
            return self._rule.keeps(iteration)
        left, step = self._most - self._written, 1
        share = self._most
        while 0 < left <= share // 4:
            share, step = share // 4, step * RARER
        return left > 0 and iteration % step == 0

    def position(self) -> list[int]:
        """How far it is (JSON), for `resume`."""
        return [self._written, self._last, int(self._keeps)]

    def resume(self, position: list[int]) -> None:
        """Go on from there."""
        self._written, self._last, keeps = position
        self._keeps = bool(keeps)


class Detail:
    """What of a rank's rows is written: its ledger's by --ledger's rule, and by `auto`, unless that rule is `all`, the
    wire's at an iteration's end, an iteration's spans, and the iterations of ranks other than 0."""

    def __init__(self, kept: str, rank: int, world_size: int):
        rule = LedgerRule.parse(kept)
        other = rule if rule.name == ALL else LedgerRule(AUTO)
        most = MOST_ROWS // world_size
        self.kept = kept
        self.calls = Thinning(rule, MOST_CALLS // world_size)
        self.iterations = Thinning(LedgerRule(ALL) if rank == 0 else other, most)
        self.spans, self.wire = Thinning(other, most), Thinning(other, most)

    def of_row(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """An iteration's row as it is to be written, with its spans or without; None where it is not."""
        iteration, spans = row["iteration"], row.get("spans_seconds")
        if not self.iterations.keeps(iteration):
            return None
        self.iterations.wrote(1)
        if spans is None:
            return row
        if not self.spans.keeps(iteration):
            return {name: value for name, value in row.items() if name != "spans_seconds"}
        self.spans.wrote(1)
        return row | {"spans_seconds": [[name, round(begin, 9), round(length, 9)] for name, begin, length in spans]}

    def position(self) -> dict[str, list[int]]:
        """How far each is (JSON), for `resume`."""
        return {name: one.position() for name, one in self._all().items()}

    def resume(self, position: dict[str, list[int]]) -> None:
        """Go on from there."""
        for name, one in self._all().items():
            one.resume(position[name])

    def _all(self) -> dict[str, Thinning]:
        return {name: one for name, one in vars(self).items() if isinstance(one, Thinning)}
