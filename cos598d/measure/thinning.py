"""Which rows of iterations and calls are written, so that a long run does not fill the disk: --ledger, and `auto`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cos598d.errors import UsageError
from cos598d.records.conventions import COUNTED

ALL, FIRST, EVERY, TOTALS, AUTO = "all", "first", "every", "totals", "auto"
FORMS = f"{ALL}, {FIRST}:N, {EVERY}:N, {TOTALS} or {AUTO}"


@dataclass(frozen=True)
class LedgerRule:
    """The value of --ledger for the ledger's rows: the name of a rule, and its number if it has one."""

    name: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> "LedgerRule":
        """The rule for a value of the flag. Raises UsageError for an invalid one."""
        if text in (ALL, TOTALS, AUTO):
            return cls(text)
        found = re.fullmatch(rf"({FIRST}|{EVERY}):([1-9]\d{{0,17}})", text, re.ASCII)
        if not found:
            raise UsageError(f"--ledger {text} is not valid. Give {FORMS}, with a whole number N of at least 1.")
        return cls(found[1], int(found[2]))

    def keeps(self, iteration: int) -> bool:
        """Whether the rows of `iteration` are kept, for rules that depend only on its number."""
        if self.name == FIRST:
            return iteration <= self.number
        if self.name == EVERY:
            return iteration % self.number == 0
        return self.name != TOTALS


# The most rows that all ranks of a run keep together with the rule `auto`. A call's row with the longest names has some
# 350 bytes.
MOST_CALLS, MOST_ROWS = 200_000, 30_000
RARER = 10  # the factor by which rows become rarer each time that three quarters of the remaining budget are used


class Thinning:
    """Decides for successive iterations whether their rows are kept.

    With `auto` all rows are kept until three quarters of the `most` rows are written. Then every 10th iteration's are,
    until three quarters of the rest are; then every 100th's, and so on. The total never exceeds `most`, except by the
    last one's rows. The decisions do not depend on interruptions or on seconds.
    """

    def __init__(self, rule: LedgerRule, most: int):
        self._rule, self._most = rule, most
        self.state = [0, -1, True]  # rows written, the last iteration decided on, and the decision (JSON)

    def keeps(self, iteration: int) -> bool:
        """Whether the rows of `iteration` are kept: the same answer until the next one."""
        if iteration != self.state[1]:
            self.state[1:] = iteration, self._decide(iteration)
        return bool(self.state[2])

    def wrote(self, rows: int) -> None:
        """Count rows that have been written."""
        self.state[0] += rows

    def _decide(self, iteration: int) -> bool:
        if self._rule.name != AUTO:
            return self._rule.keeps(iteration)
        left, step = self._most - self.state[0], 1
        share = self._most
        while 0 < left <= share // 4:
            share, step = share // 4, step * RARER
        return left > 0 and iteration % step == 0


# A row's fields that only the sums need: they are not written.
UNWRITTEN = frozenset(("wall_seconds_after", "counted_packets_sent", "counted_packets_received", *COUNTED))


class Detail:
    """Thins a rank's rows. --ledger decides for the ledger's rows. Unless its rule is `all`, `auto` decides for the
    network's at an iteration's end, an iteration's spans, and the iterations of ranks other than 0."""

    def __init__(self, kept: str, rank: int, world_size: int):
        rule = LedgerRule.parse(kept)
        other = rule if rule.name == ALL else LedgerRule(AUTO)
        most = MOST_ROWS // world_size
        self.kept = kept
        self.calls = Thinning(rule, MOST_CALLS // world_size)
        self.iterations = Thinning(LedgerRule(ALL) if rank == 0 else other, most)
        self.spans, self.wire = Thinning(other, most), Thinning(other, most)

    def of_row(self, row: dict[str, Any], is_new: bool = False) -> dict[str, Any] | None:
        """The current iteration's row as it is to be written, with its spans or without; None if it is not.

        A new row is counted.
        """
        iteration = row["iteration"]
        if not self.iterations.keeps(iteration):
            return None
        written = {name: value for name, value in row.items() if name not in UNWRITTEN}
        has_spans = "spans_seconds" in row and self.spans.keeps(iteration)
        if not has_spans:
            written.pop("spans_seconds", None)
        if is_new:
            self.iterations.wrote(1)
            self.spans.wrote(int(has_spans))
        return written

    def position(self) -> dict[str, list[int]]:
        """The state of each rule (JSON), for `resume`."""
        return {name: one.state for name, one in vars(self).items() if isinstance(one, Thinning)}

    def resume(self, position: Mapping[str, list[int]]) -> None:
        """Continue from there."""
        for name, state in position.items():
            getattr(self, name).state = list(state)
