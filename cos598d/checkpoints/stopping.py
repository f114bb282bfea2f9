"""Why a training stops before its last step: signals, --max_seconds, evaluations that no longer improve."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cos598d.checkpoint_flags import LOSS_METRIC, CheckpointFlags
from cos598d.comm.group import Ranks
from cos598d.terminal.signals import ENDING, Requests


@dataclass
class Best:
    """The best evaluation so far by a metric, and how many since then were no better. iteration: 0 before the first.

    A smaller loss is better; of any other metric, a larger value. An evaluation without a finite value is worse than
    all that have one. Every rank sees the same metrics, so all make the same decision.
    """

    metric: str = LOSS_METRIC
    value: float | None = None
    iteration: int = 0
    waited: int = 0

    def see(self, metrics: Mapping[str, Any], iteration: int) -> bool:
        """Take the metrics after an iteration. Return whether they are the best so far."""
        value, is_less = metrics.get(self.metric), self.metric == LOSS_METRIC
        if value is None or (self.value is not None and not (value < self.value if is_less else value > self.value)):
            self.waited += 1
            return False
        self.value, self.iteration, self.waited = value, iteration, 0
        return True

    def sentence(self) -> str:
        """Why training stops early."""
        which = "" if self.value is None else f" {self.value:.4f} after iteration {self.iteration}"
        return f"stopped early: {self.waited} evaluations in a row had no better {self.metric} than the best{which}"


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
