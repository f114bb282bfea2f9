"""Why a training ends before its last step, and how the ranks agree on it."""

from collections.abc import Mapping
from typing import Any

from cos598d.life import LOSS_METRIC


class EarlyStopping:
    """The best evaluation so far, and how many have come since then that were no better.

    A loss is better when it is smaller, any other metric when it is larger; an evaluation without a finite one is worse
    than all that have one. Every rank sees the same metrics, so all of them come to the same end.
    """

    def __init__(self, metric: str = LOSS_METRIC, patience: int | None = None):
        """`patience`: after how many evaluations that were no better `is_over`; None: never."""
        self.metric, self.patience = metric, patience
        self.best: float | None = None
        self.best_iteration = 0
        self.waited = 0

    @property
    def is_over(self) -> bool:
        """Whether the patience is at its end."""
        return self.patience is not None and self.waited >= self.patience

    def sentence(self) -> str:
        """Why training stops, when it `is_over`."""
        best = "" if self.best is None else f" {self.best:.4f} after iteration {self.best_iteration}"
        return f"stopped early: {self.waited} evaluations in a row had no better {self.metric} than the best{best}"

    def see(self, metrics: Mapping[str, Any], iteration: int) -> bool:
        """The metrics after an iteration; whether they are the best so far."""
        value = metrics.get(self.metric)
        is_best = value is not None and (self.best is None or self._is_better(value, self.best))
        if is_best:
            self.best, self.best_iteration, self.waited = value, iteration, 0
        else:
            self.waited += 1
        return is_best

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.metric == LOSS_METRIC else value > other
