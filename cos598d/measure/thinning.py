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
    """What --ledger says of the ledger's rows: a rule by its name, and its number where it has one."""

    name: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> "LedgerRule":
        """The rule in the words of the flag. Raises UsageError for another."""
        if text in (ALL, TOTALS, AUTO):
            return cls(text)
        found = re.fullmatch(rf"({FIRST}|{EVERY}):([1-9]\d{{0,17}})", text, re.ASCII)
        if not found:
            raise UsageError(f"--ledger {text} is not valid. Give {FORMS}, with a whole number N of at least 1.")
        return cls(found[1], int(found[2]))

    def keeps(self, iteration: int) -> bool:
        """Whether the rows of `iteration` are kept; the rule `auto` knows by their number alone."""
        if self.name == FIRST:
            return iteration <= self.number
        if self.name == EVERY:
            return iteration % self.number == 0
        return self.name != TOTALS


# How many rows all ranks of a run keep together by the rule `auto`; with the longest names a call's has some 350 bytes.
MOST_CALLS, MOST_ROWS = 200_000, 30_000
RARER = 10  # times as rare, each time that all but a quarter of what was left is spent


class Thinning:
    """Decides of one iteration after the other, in their order, whether its rows are kept.

    By `auto` all are, until three quarters of the `most` rows are written; then those of every 10th iteration, until
    three quarters of the rest are; then of every 100th, and so on: the later the rarer, and never more than `most`
    except for the last one's. The same run decides alike whenever it is interrupted, and whatever its seconds are.
    """

    def __init__(self, rule: LedgerRule, most: int):
        self._rule, self._most = rule, most
        self.state = [0, -1, True]  # rows written, the last iteration that was decided of, and how (JSON)

    def keeps(self, iteration: int) -> bool:
        """Whether the rows of `iteration` are kept: the same answer until the next one."""
        if iteration != self.state[1]:
            self.state[1:] = iteration, self._decide(iteration)
        return bool(self.state[2])

    def wrote(self, rows: int) -> None:
        """So many rows have been written."""
        self.state[0] += rows

    def _decide(self, iteration: int) -> bool:
        if self._rule.name != AUTO:
            return self._rule.keeps(iteration)
        left, step = self._most - self.state[0], 1
        share = self._most
        while 0 < left <= share // 4:
            share, step = share // 4, step * RARER
        return left > 0 and iteration % step == 0


# What a row of an iteration has for the sums alone: it is not written.
UNWRITTEN = frozenset(("wall_seconds_after", "counted_packets_sent", "counted_packets_received", *COUNTED))


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

    def of_row(self, row: dict[str, Any], is_new: bool = False) -> dict[str, Any] | None:
        """The row of the iteration under way as it is to be written, with its spans or without; None if it is not.

        A new one is counted."""
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
        """How far each is (JSON), for `resume`."""
        return {name: one.state for name, one in vars(self).items() if isinstance(one, Thinning)}

    def resume(self, position: Mapping[str, list[int]]) -> None:
        """Go on from there."""
        for name, state in position.items():
            getattr(self, name).state = list(state)
