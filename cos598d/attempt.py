"""One attempt of a run's training: from where it starts or resumes to its end, or until it is asked to stop."""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.checkpoints.folder import steps
from cos598d.checkpoints.saving import Checkpoints
from cos598d.checkpoints.stopping import Stopping
from cos598d.errors import UserError
from cos598d.evaluate import Evaluation
from cos598d.loop import Job, train
from cos598d.optimizers import remembered
from cos598d.parallel import Parallel
from cos598d.plan import Plan, Position
from cos598d.terminal.signals import Requests


class Attempt(Stopping):
    """Decides between two steps, the same on every rank, whether a training is saved and whether it goes on.

    A checkpoint is written when the plan says so, and when the ranks' votes end the training.
    """

    def __init__(self, job: Job, requests: Requests, checkpoints: Checkpoints):
        super().__init__(requests)
        self._job, self._checkpoints = job, checkpoints
        self._saved_at = 0

    def begin(self, plan: Plan, model: Parallel, scaler: ShardedGradScaler) -> Position:
        """Continue from the checkpoint, if any. Return where the training begins."""
        self._plan, self._model, self._scaler = plan, model, scaler
        if self._checkpoints.found is None:
            return Position()
        training, said = self._checkpoints.restore(model, scaler, remembered(self._job.config))
        self._job.console.say(said)
        self._saved_at = training.position.iteration
        return training.position

    def saves(self, at: Position) -> bool:
        """Whether the training is to be saved now."""
        return at.iteration != self._saved_at and (self.reason is not None or self._plan.saves(at))

    def save(self, at: Position) -> None:
        """Save the training."""
        # The record's rows reach the disk before the checkpoint is complete: a resumed run continues after both.
        self._checkpoints.save(self._model, self._scaler, at, self._job.record.write_last)
        self._saved_at = at.iteration


def train_and_checkpoint(job: Job, evaluation: Evaluation, checkpoints: Checkpoints) -> bool:
    """Train until the work is done, or until a signal asks for the end. Every rank calls it.

    Return whether it stopped before the work was done. During training, the signals of `terminal/signals.ENDING` are
    only noted. Raises UserError as `train` does, and if nothing was saved before it stopped.
    """
    with Requests() as requests:
        attempt = Attempt(job, requests, checkpoints)
        train(job, lambda: evaluation(attempt.is_asked), attempt)
        record, console = job.record, job.console
        if attempt.reason:
            requests.is_met = True
            record.ends(attempt.reason)
            why = f"{attempt.reason} after iteration {record.iterations}"
            if not job.ranks.exchange(bool(steps(checkpoints.folder)))[0]:
                raise UserError(f"{why}, and no checkpoint could be saved. Make room there, then start again.")
            place = "" if job.config.output_dir is not None else f" --output_dir {record.folder}"
            again = "again" if job.config.resume else f"with --resume auto{place}"
            console.say_last(f"{why}. To go on, run the same command {again}.")
        return bool(attempt.reason)
