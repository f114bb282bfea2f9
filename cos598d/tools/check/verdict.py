"""What became of a test, in one form: of a sync's claim, a strategy's case and a lesson's check."""

from collections.abc import Iterable
from typing import Any, Protocol

PASSED, FAILED, DID_NOT_END, CRASHED = "passed", "failed", "did not end", "crashed"
# Of a strategy's case besides. It is wrong where its numbers are, and failed where the strategy raised an error.
KEPT, WRONG, REFUSED, NOT_CLAIMED = "kept", "wrong", "refused", "not claimed"
# Of several statuses on several numbers of ranks, the first is the test's: passed is what passed on all of them.
WORST_FIRST = (CRASHED, DID_NOT_END, FAILED, WRONG, REFUSED, NOT_CLAIMED, KEPT, PASSED)


class Verdict(Protocol):
    """What became of a test on one number of ranks: its status, and by `details` what else JSON has of it."""

    @property
    def status(self) -> str: ...

    def details(self) -> dict[str, Any]: ...


def result_of(
    kind: str, name: str, says: str, verdicts: Iterable[tuple[int, Verdict]], status: str = ""
) -> dict[str, Any]:
    """A test's result as JSON: its name under `kind`, what it `says`, and what became of it on each number of ranks.

    Its status is the worst, unless one is given.
    """
    found = list(verdicts)
    return {
        kind: name,
        "says": says,
        "status": status or min((verdict.status for _, verdict in found), key=WORST_FIRST.index),
        "outcomes": [{"world_size": size, "status": each.status, **each.details()} for size, each in found],
    }
