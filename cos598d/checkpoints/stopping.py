"""Why a training stops before its last step: signals and --max_seconds."""

import time
from collections.abc import Sequence

from cos598d.checkpoint_flags import CheckpointFlags
from cos598d.comm.group import Ranks
from cos598d.terminal.signals import ENDING, Requests


class Stopping:
    """Requests to end between two steps. The ranks agree on them at no cost.

    1. In every step each rank gives its `votes`, which are sent with the loss: the signals that it has received. Rank
       0, whose clock decides, also votes on whether --max_seconds have passed.
    2. Every rank passes their sums, which are equal, to `count`. Then `reason` is why all stop after this step, as a
       phrase; None: no request.
    3. While the ranks evaluate, no loss is sent. A rank that `is_asked` to end evaluates no further, and says so when
       the others have done their part.

    --max_seconds counts from `began`, a time of `time.monotonic`.
    """

    reason: str | None = None

    def __init__(self, flags: CheckpointFlags, ranks: Ranks, requests: Requests, began: float):
        self._limit, self._is_timed = flags.max_seconds or 0.0, flags.max_seconds is not None and ranks.rank == 0
        self._requests, self._began = requests, began

    def is_asked(self) -> bool:
        """Whether this rank would vote for the end now."""
        return any(self.votes())

    def votes(self) -> list[float]:
        """This rank's votes: one for each signal, then on --max_seconds."""
        is_late = self._is_timed and time.monotonic() - self._began >= self._limit
        return [*(float(self._requests.first == number) for number in ENDING), float(is_late)]

    def count(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' votes of one step."""
        why = [*(f"stopped by {number.name}" for number in ENDING), f"--max_seconds {self._limit:g} have passed"]
        self.reason = next((reason for reason, votes in zip(why, sums, strict=True) if votes), None)
