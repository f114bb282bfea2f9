"""The outcome of a test, in one form: of a sync's claim, a strategy's case and a lesson's check."""

from collections.abc import Iterable
from typing import Any, Protocol

PASSED, FAILED, DID_NOT_END, CRASHED = "passed", "failed", "did not end", "crashed"
# Only a strategy's case has these. It is wrong if its numbers are, and failed if the strategy raised an error.
KEPT, WRONG, REFUSED, NOT_CLAIMED = "kept", "wrong", "refused", "not claimed"
# The first of these among a test's statuses on several numbers of ranks is the test's: passed means on all of them.
WORST_FIRST = (CRASHED, DID_NOT_END, FAILED, WRONG, REFUSED, NOT_CLAIMED, KEPT, PASSED)


class Verdict(Protocol):
    """The outcome of a test on one number of ranks: its status, and in `details` its other JSON fields."""

    @property
    def status(self) -> str: ...

    def details(self) -> dict[str, Any]: ...


def result_of(
    kind: str, name: str, says: str, verdicts: Iterable[tuple[int, Verdict]], status: str = ""
) -> dict[str, Any]:
    """A test's result as JSON: its name under `kind`, what it tests (`says`), and the outcome on each number of ranks.

    Its status is the worst, unless one is given.
    """
    found = list(verdicts)
    return {
        kind: name,
        "says": says,
        "status": status or min((verdict.status for _, verdict in found), key=WORST_FIRST.index),
        "outcomes": [{"world_size": size, "status": each.status, **each.details()} for size, each in found],
    }
