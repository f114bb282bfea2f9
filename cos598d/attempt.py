"""One attempt of a run's training: from where it starts or resumes to its end, or until it is asked to stop."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.checkpoints.folder import step_name
from cos598d.checkpoints.resume import how_to_go_on
from cos598d.checkpoints.saving import Checkpoints
from cos598d.checkpoints.stopping import EarlyStopping, Stopping
from cos598d.errors import UserError
from cos598d.evaluate import Evaluation
from cos598d.loop import Job, train
from cos598d.optimizers import OPTIMIZERS
from cos598d.parallel import Parallel
from cos598d.plan import Plan, Position
from cos598d.terminal.signals import GOES_ON, Requests


@dataclass(frozen=True)
class TrainResult:
    """How one attempt of a training ended, the same on every rank.

    stopped: the reason if it stopped before the work was done, else None. saved: the iteration of the newest complete
    checkpoint, or None. best: facts about the best evaluation, as JSON for the summary, or None.
    """

    stopped: str | None
    saved: int | None
    best: dict[str, Any] | None


class Attempt(Stopping):
    """Decides between two steps, the same on every rank, whether a training is saved and whether it goes on.

    A checkpoint is written when the plan says so, when the ranks' votes ask for one, and after the best evaluation.
    """

    def __init__(self, job: Job, requests: Requests, began: float, checkpoints: Checkpoints, facts: Mapping[str, Any]):
        """`facts` are what must be equal in every attempt of a run."""
        super().__init__(job.config, job.ranks, requests, began)
        self.early = EarlyStopping(job.config.metric(), job.config.patience())
        self._job, self._checkpoints, self._facts = job, checkpoints, dict(facts)
        self._is_best = False  # whether the latest evaluation is the best so far

    def begin(self, plan: Plan, model: Parallel, scaler: ShardedGradScaler) -> Position:
        """Continue from the checkpoint, if any. Return where the training begins."""
        self._plan, self._model, self._scaler, at = plan, model, scaler, Position()
        config, checkpoints = self._job.config, self._checkpoints
        if checkpoints.found is not None:
            kinds = OPTIMIZERS[config.optimizer].kinds
            training, said = checkpoints.restore(model, scaler, kinds, config.seed)
            at = replace(training.position)
            self.early.resume(training.best)
            if config.dropout != 0 and training.ranks != self._job.ranks.world_size:
                said.append("dropout masks differ")
            self._job.console.say("; ".join(said))
        if plan.has_checkpoints:
            checkpoints.open()
        self._saved_at = replace(at)
        return at

    def see(self, metrics: Mapping[str, Any], at: Position) -> None:
        """Take the metrics of an evaluation."""
        self._is_best = self.early.see(metrics, at.iteration)

    @property
    def is_over(self) -> bool:
        """Whether no further step follows, even if the plan has more."""
        return self.reason is not None or self.early.is_over

    def saves(self, at: Position) -> bool:
        """Whether the training is to be saved now."""
        if at == self._saved_at:
            return False
        is_best = self._is_best and self._plan.has_checkpoints
        return self.reason is not None or self.wants_save or is_best or self._plan.saves(at)

    def save(self, at: Position) -> None:
        """Save the training."""
        if not self._plan.has_checkpoints:  # it is saved because it was asked to stop
            self._checkpoints.open()
        record, now = self._job.record, replace(at)
        # The record's rows reach the disk before the checkpoint is complete: a resumed run continues after both.
        self._checkpoints.save(self._model, self._scaler, now, self.early.best, self._facts, record.write_last)
        record.checkpoint(self._checkpoints.folder / step_name(at.iteration))
        self.saved()
        self._is_best, self._saved_at = False, now


def train_and_checkpoint(
    job: Job, evaluation: Evaluation, checkpoints: Checkpoints, facts: Mapping[str, Any], began: float
) -> TrainResult:
    """Train until the work is done, or until a signal or --max_seconds asks for the end. Every rank calls it.

    During training, the signals of `terminal/signals.ENDING` are only noted. --max_seconds counts from `began`, a
    time.monotonic(). With --early_stopping, the model has the best weights afterwards. Raises UserError as `train`
    does, and if no checkpoint can be saved.
    """
    with Requests() as requests:
        attempt = Attempt(job, requests, began, checkpoints, facts)
        train(job, lambda: evaluation(attempt.is_asked), attempt)
        saved = checkpoints.close()
        if attempt.reason:
            requests.is_met = True
            job.record.ends(attempt.reason)
            return TrainResult(attempt.reason, saved, None)
        if attempt.early.is_over:
            job.console.say(attempt.early.sentence())
            job.record.ends(attempt.early.sentence())
        return TrainResult(None, saved, _end_with_the_best(job, attempt.early, checkpoints, evaluation))


def _end_with_the_best(
    job: Job, early: EarlyStopping, checkpoints: Checkpoints, evaluation: Evaluation
) -> dict[str, Any] | None:
    """Return facts about the best evaluation. With --early_stopping, also load its weights and evaluate them again."""
    best = early.best
    if best.value is None:
        return None
    facts = {"iteration": best.iteration, "metric": best.metric, "value": best.value}
    if early.patience is None or best.iteration == job.record.iterations:
        return facts
    if not checkpoints.load_best(job.model, best.iteration):  # the disk was full, or somebody deleted it
        job.console.say(f"the best model, after iteration {best.iteration}, could not be kept, so the last one is")
        return facts
    metrics = evaluation() or {}
    job.console.evaluation({"iteration": best.iteration} | metrics)
    return facts | {"evaluated": metrics}


def leave(result: TrainResult, job: Job) -> int:
    """Print why a run stops before its work is done, and how to resume it; return the exit code.

    Raises UserError, the same on every rank, if it cannot be resumed because nothing is saved.
    """
    iteration = job.record.iterations
    if result.saved is None:
        raise UserError(
            f"{result.stopped} after iteration {iteration}, and no checkpoint could be saved. Make room in the run's "
            "folder, then start again."
        )
    lost = "" if result.saved == iteration else f"; the newest checkpoint is of iteration {result.saved}"
    how = how_to_go_on(job.record.folder, job.config)
    job.console.say_last(f"{result.stopped} after iteration {iteration}{lost}. {how}")
    return GOES_ON
