"""Why a training stops before its last step: signals, --max_seconds, evaluations that no longer improve."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cos598d.checkpoint_flags import LOSS_METRIC, CheckpointFlags
from cos598d.comm.group import Ranks
from cos598d.terminal.signals import ENDING, Requests

_SIGNALS = tuple(number.name for number in ENDING)
_TIME, _SAVE = "max_seconds", "save"


@dataclass
class Best:
    """The best evaluation so far by a metric, and how many since then were no better. iteration: 0 before the first."""

    metric: str = LOSS_METRIC
    value: float | None = None
    iteration: int = 0
    waited: int = 0


class EarlyStopping:
    """Finds the best evaluation, and ends a training after `patience` evaluations in a row without a better one.

    A smaller loss is better; of any other metric, a larger value. An evaluation without a finite value is worse than
    all that have one. Every rank sees the same metrics, so all make the same decision.
    """

    def __init__(self, metric: str = LOSS_METRIC, patience: int | None = None):
        """`patience`: None to never end."""
        self.best, self.patience = Best(metric), patience

    def resume(self, best: Best) -> None:
        """Continue from there. If the metric has changed, the best is looked for from the start."""
        if best.metric == self.best.metric:
            self.best = replace(best)

    @property
    def is_over(self) -> bool:
        """Whether the patience is used up."""
        return self.patience is not None and self.best.waited >= self.patience

    def sentence(self) -> str:
        """Why training stops, if it `is_over`."""
        best = self.best
        which = "" if best.value is None else f" {best.value:.4f} after iteration {best.iteration}"
        return f"stopped early: {best.waited} evaluations in a row had no better {best.metric} than the best{which}"

    def see(self, metrics: Mapping[str, Any], iteration: int) -> bool:
        """Take the metrics after an iteration. Return whether they are the best so far."""
        best, value = self.best, metrics.get(self.best.metric)
        is_less = best.metric == LOSS_METRIC
        if value is None or (best.value is not None and not (value < best.value if is_less else value > best.value)):
            best.waited += 1
            return False
        self.best = Best(best.metric, value, iteration)
        return True


class Stopping:
    """Requests to end between two steps, or to save a checkpoint. The ranks agree on them at no cost.

    1. In every step each rank gives its `votes`, which are sent with the loss: the signals that it has received. Rank
       0, whose clock decides, also votes on whether --max_seconds or --save_seconds have passed.
    2. Every rank passes their sums, which are equal, to `count`. Then `reason` is why all stop after this step, as a
       phrase (None: no request), and `wants_save` is whether a checkpoint is due.
    3. While the ranks evaluate, no loss is sent. A rank that `is_asked` to end evaluates no further, and says so when
       the others have done their part.

    --max_seconds counts from `began`, a time of `clock`, which must be monotonic.
    """

    VOTES = (*_SIGNALS, _TIME, _SAVE)

    def __init__(
        self,
        flags: CheckpointFlags,
        ranks: Ranks,
        requests: Requests,
        began: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._flags, self._ranks, self._requests, self._clock = flags, ranks, requests, clock
        self._began, self._saved = began, clock()
        self.reason: str | None = None
        self.wants_save = False

    def is_asked(self) -> bool:
        """Whether this rank would vote for the end now."""
        return self._requests.first is not None or self._has_passed(self._flags.max_seconds, self._began)

    def votes(self) -> list[float]:
        """This rank's votes, one for each of VOTES."""
        first = self._requests.first
        wishes = {name: first is not None and name == first.name for name in _SIGNALS}
        wishes[_TIME] = self._has_passed(self._flags.max_seconds, self._began)
        wishes[_SAVE] = self._has_passed(self._flags.save_seconds, self._saved)
        return [float(wishes[name]) for name in self.VOTES]

    def count(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' votes of one step."""
        found = [name for name, votes in zip(self.VOTES, sums, strict=True) if votes]
        self.wants_save = _SAVE in found
        passed = f"--max_seconds {self._flags.max_seconds or 0:g} have passed"
        self.reason = next((passed if name == _TIME else f"stopped by {name}" for name in found if name != _SAVE), None)

    def saved(self) -> None:
        """Called after a checkpoint: --save_seconds count from here."""
        self._saved, self.wants_save = self._clock(), False

    def _has_passed(self, seconds: float | None, since: float) -> bool:
        return self._ranks.rank == 0 and seconds is not None and self._clock() - since >= seconds
