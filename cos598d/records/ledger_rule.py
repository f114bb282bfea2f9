"""What --ledger takes: of which iterations the ledger's rows are kept."""

import re
from dataclasses import dataclass

from cos598d.errors import UsageError

ALL, FIRST, EVERY, TOTALS, AUTO = "all", "first", "every", "totals", "auto"
FORMS = f"{ALL}, {FIRST}:N, {EVERY}:N, {TOTALS} or {AUTO}"


@dataclass(frozen=True)
class LedgerRule:
    """A rule by its name, and its number where it has one."""

    name: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> "LedgerRule":
        """The rule in the words of the flag. Raises UsageError for another."""
        if text in (ALL, TOTALS, AUTO):
            return cls(text)
        found = re.fullmatch(rf"({FIRST}|{EVERY}):([1-9]\d{{0,17}})", text, re.ASCII)
        if not found:
            raise UsageError(f"--ledger {text}: give {FORMS}, with a whole number N of at least 1.")
        return cls(found[1], int(found[2]))

    def keeps(self, iteration: int) -> bool:
        """Whether the rows of `iteration` are kept; the rule `auto` knows by their number alone."""
        if self.name == FIRST:
            return iteration <= self.number
        if self.name == EVERY:
            return iteration % self.number == 0
        return self.name != TOTALS
