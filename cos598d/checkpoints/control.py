"""What comes between two steps of a training, beside an evaluation: it is saved, or it ends before its last step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cos598d.checkpoints.saver import Saving
from cos598d.checkpoints.stopping import EarlyStopping, Stopping
from cos598d.config import RunConfig
from cos598d.plan import Plan, Position
from cos598d.strategies.base import Strategy


class TrainingControl:
    """Decides between two steps, the same on every rank, whether a training is saved and whether it goes on.

    `stopping` is who may ask for the end, and `saving` where checkpoints go; None: nobody does, and nowhere. `stopped`
    says why the training is stopped before its work is done; None where it is not, or comes to its end early.
    """

    stopped: str | None = None

    def __init__(self, config: RunConfig, stopping: Stopping | None = None, saving: Saving | None = None):
        self.early = EarlyStopping(config.metric(), config.patience())
        self._stopping, self._saving = stopping, saving
        self._is_best = False  # what was evaluated last, of all evaluations so far

    def begin(self, strategy: Strategy, plan: Plan) -> Position:
        """Where the training begins: `strategy` is attached, and goes on from a checkpoint where there is one."""
        self._strategy, self._plan = strategy, plan
        at = self._saving.restore(strategy, self.early) if self._saving else Position()
        if self._saving and plan.has_checkpoints:
            self._saving.open()  # a folder that cannot be written is told before the first step
        self._saved = replace(at)
        return at

    def votes(self) -> Sequence[float]:
        """What this rank adds to the votes that travel with a step's loss."""
        return self._stopping.votes() if self._stopping else ()

    def count(self, votes: Sequence[float]) -> None:
        """The votes of all ranks are in, summed up: after a step, or when an evaluation was broken off."""
        if self._stopping:
            self._stopping.count(votes)
            self.stopped = self._stopping.reason
        if self._saving:
            self._saving.poll()

    def see(self, metrics: Mapping[str, Any], at: Position) -> None:
        """The model was evaluated."""
        self._is_best = self.early.see(metrics, at.iteration)

    @property
    def is_over(self) -> bool:
        """Whether no further step is to follow, however many there were to be."""
        return self.stopped is not None or self.early.is_over

    def saves(self, at: Position) -> bool:
        """Whether the training is to be saved as it is now."""
        if self._saving is None or at == self._saved:
            return False
        is_time = self._stopping is not None and self._stopping.wants_save
        is_best = self._is_best and self._plan.has_checkpoints
        return self.stopped is not None or is_time or is_best or self._plan.saves(at)

    def save(self, at: Position) -> None:
        """Save it: a copy is taken, and written while the next steps run."""
        assert self._saving is not None  # `saves` has said so
        self._saving.save(self._strategy, at, self.early, self._is_best and at.evaluated == at.iteration)
        if self._stopping:
            self._stopping.saved()
        self._is_best, self._saved = False, replace(at)
