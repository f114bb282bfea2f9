"""One attempt of a run's training: from where it starts or resumes to its end, or until it is asked to stop."""

from typing import Any

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.checkpoints.folder import steps
from cos598d.checkpoints.saving import Checkpoints
from cos598d.checkpoints.stopping import Best, Stopping
from cos598d.errors import UserError
from cos598d.evaluate import Evaluation
from cos598d.loop import Job, train
from cos598d.optimizers import remembered
from cos598d.parallel import Parallel
from cos598d.plan import Plan, Position
from cos598d.terminal.signals import Requests


class Attempt(Stopping):
    """Decides between two steps, the same on every rank, whether a training is saved and whether it goes on.

    A checkpoint is written when the plan says so, when the ranks' votes end the training, and after the best evaluation
    of --early_stopping.
    """

    def __init__(self, job: Job, requests: Requests, began: float, checkpoints: Checkpoints):
        super().__init__(job.config, job.ranks, requests, began)
        self.best, self.patience = Best(job.config.metric()), job.config.patience()
        self._job, self._checkpoints = job, checkpoints
        self._saved_at = 0

    def begin(self, plan: Plan, model: Parallel, scaler: ShardedGradScaler) -> Position:
        """Continue from the checkpoint, if any. Return where the training begins."""
        self._plan, self._model, self._scaler = plan, model, scaler
        if self._checkpoints.found is None:
            return Position()
        training, said = self._checkpoints.restore(model, scaler, remembered(self._job.config))
        if training.best.metric == self.best.metric:  # else the best is looked for from the start
            self.best = training.best
        self._job.console.say(said)
        self._saved_at = training.position.iteration
        return training.position

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
        is_best = self.patience is not None and self.best.iteration == at.iteration
        return at.iteration != self._saved_at and (self.reason is not None or is_best or self._plan.saves(at))

    def save(self, at: Position) -> None:
        """Save the training."""
        # The record's rows reach the disk before the checkpoint is complete: a resumed run continues after both.
        self._checkpoints.save(self._model, self._scaler, at, self.best, self._job.record.write_last)
        self._saved_at = at.iteration


def train_and_checkpoint(
    job: Job, evaluation: Evaluation, checkpoints: Checkpoints, began: float
) -> tuple[bool, dict[str, Any] | None]:
    """Train until the work is done, or until a signal or --max_seconds asks for the end. Every rank calls it.

    Return whether it stopped before the work was done, and facts about the best evaluation, as JSON for the summary.
    During training, the signals of `terminal/signals.ENDING` are only noted. --max_seconds counts from `began`, a
    time.monotonic(). With --early_stopping, the model has the best weights afterwards. Raises UserError as `train`
    does, and if nothing was saved before it stopped.
    """
    with Requests() as requests:
        attempt = Attempt(job, requests, began, checkpoints)
        train(job, lambda: evaluation(attempt.is_asked), attempt)
        best, record, console = attempt.best, job.record, job.console
        if attempt.reason:
            requests.is_met = True
            record.ends(attempt.reason)
            why = f"{attempt.reason} after iteration {record.iterations}"
            if not job.ranks.exchange(bool(steps(checkpoints.folder)))[0]:
                raise UserError(f"{why}, and no checkpoint could be saved. Make room there, then start again.")
            place = "" if job.config.output_dir is not None else f" --output_dir {record.folder}"
            again = "again" if job.config.resume else f"with --resume auto{place}"
            console.say_last(f"{why}. To go on, run the same command {again}.")
            return True, None
        if attempt.has_no_patience:
            console.say(best.sentence())
            record.ends(best.sentence())
        if best.value is None:
            return False, None
        found: dict[str, Any] = {"iteration": best.iteration, "metric": best.metric, "value": best.value}
        if attempt.patience is not None and best.iteration != record.iterations:
            if checkpoints.load_best(job.model, best.iteration):
                found["evaluated"] = evaluation() or {}
                console.evaluation({"iteration": best.iteration} | found["evaluated"])
            else:  # the disk was full, or somebody deleted it
                console.say(f"the best model, of iteration {best.iteration}, was not kept, so the last one is")
        return False, found
