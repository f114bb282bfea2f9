"""One attempt of a run's training: from where it starts or resumes to its end, or until it is asked to stop."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.checkpoints.resume import how_to_go_on
from cos598d.checkpoints.saving import Checkpoints
from cos598d.checkpoints.stopping import Best, Stopping
from cos598d.errors import UserError
from cos598d.evaluate import Evaluation
from cos598d.loop import Job, train
from cos598d.optimizers import OPTIMIZERS
from cos598d.parallel import Parallel
from cos598d.plan import Plan, Position
from cos598d.terminal.signals import GOES_ON, Requests


class TrainResult(NamedTuple):
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
        self.best, self.patience = Best(job.config.metric()), job.config.patience()
        self._job, self._checkpoints, self._facts = job, checkpoints, dict(facts)
        self._is_best = False  # whether the latest evaluation is the best so far
        self._saved_at = 0

    def begin(self, plan: Plan, model: Parallel, scaler: ShardedGradScaler) -> Position:
        """Continue from the checkpoint, if any. Return where the training begins."""
        self._plan, self._model, self._scaler = plan, model, scaler
        if self._checkpoints.found is None:
            return Position()
        config = self._job.config
        training, said = self._checkpoints.restore(model, scaler, OPTIMIZERS[config.optimizer].kinds)
        if training.best.metric == self.best.metric:  # else the best is looked for from the start
            self.best = training.best
        if config.dropout != 0 and training.ranks != self._job.ranks.world_size:
            said += "; dropout masks differ"
        self._job.console.say(said)
        self._saved_at = training.iteration
        return training.position

    def see(self, metrics: Mapping[str, Any], at: Position) -> None:
        """Take the metrics of an evaluation."""
        self._is_best = self.best.see(metrics, at.iteration)

    @property
    def has_no_patience(self) -> bool:
        """Whether so many evaluations in a row were no better than the best that training ends."""
        return self.patience is not None and self.best.waited >= self.patience

    @property
    def is_over(self) -> bool:
        """Whether no further step follows, even if the plan has more."""
        return self.reason is not None or self.has_no_patience

    def saves(self, at: Position) -> bool:
        """Whether the training is to be saved now."""
        if at.iteration == self._saved_at:
            return False
        is_best = self._is_best and self._plan.has_checkpoints
        return self.reason is not None or self.wants_save or is_best or self._plan.saves(at)

    def save(self, at: Position) -> None:
        """Save the training."""
        # The record's rows reach the disk before the checkpoint is complete: a resumed run continues after both.
        gathered = self._job.record.write_last
        self._checkpoints.save(self._model, self._scaler, at, self.best, self._facts, gathered)
        self.saved()
        self._is_best, self._saved_at = False, at.iteration


def train_and_checkpoint(
    job: Job, evaluation: Evaluation, checkpoints: Checkpoints, facts: Mapping[str, Any], began: float
) -> TrainResult:
    """Train until the work is done, or until a signal or --max_seconds asks for the end. Every rank calls it.

    During training, the signals of `terminal/signals.ENDING` are only noted. --max_seconds counts from `began`, a
    time.monotonic(). With --early_stopping, the model has the best weights afterwards. Raises UserError as `train`
    does.
    """
    with Requests() as requests:
        attempt = Attempt(job, requests, began, checkpoints, facts)
        train(job, lambda: evaluation(attempt.is_asked), attempt)
        saved, best = checkpoints.close(), attempt.best
        if attempt.reason:
            requests.is_met = True
            job.record.ends(attempt.reason)
            return TrainResult(attempt.reason, saved, None)
        if attempt.has_no_patience:
            job.console.say(best.sentence())
            job.record.ends(best.sentence())
        if best.value is None:
            return TrainResult(None, saved, None)
        found: dict[str, Any] = {"iteration": best.iteration, "metric": best.metric, "value": best.value}
        if attempt.patience is not None and best.iteration != job.record.iterations:
            if checkpoints.load_best(job.model, best.iteration):
                found["evaluated"] = evaluation() or {}
                job.console.evaluation({"iteration": best.iteration} | found["evaluated"])
            else:  # the disk was full, or somebody deleted it
                job.console.say(f"the best model, of iteration {best.iteration}, was not kept, so the last one is")
        return TrainResult(None, saved, found)


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
