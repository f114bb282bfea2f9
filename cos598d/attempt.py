"""One attempt of a run's training: from where it starts or resumes to its end, or until it is asked to stop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cos598d.checkpoints import Checkpoints
from cos598d.checkpoints.control import Stopping, TrainingControl
from cos598d.checkpoints.resume import how_to_go_on
from cos598d.comm.communicator import Communicator
from cos598d.errors import UserError
from cos598d.evaluate import Evaluation
from cos598d.loop import train
from cos598d.measure.record import RunRecord
from cos598d.plan import TrainingSetup
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


def train_and_checkpoint(
    setup: TrainingSetup, evaluation: Evaluation, checkpoints: Checkpoints, facts: Mapping[str, Any], began: float
) -> TrainResult:
    """Train until the work is done, or until a signal or --max_seconds asks for the end. Every rank calls it.

    During training, the signals of `terminal/signals.ENDING` are only noted. `facts` are what must be equal in every
    attempt of a run. --max_seconds counts from `began`, a time.monotonic(). With --early_stopping, the model has the
    best weights afterwards. Raises UserError as `train` does, and if no checkpoint can be saved.
    """
    with Requests() as requests, checkpoints:
        stopping = Stopping(setup.config, setup.comm, requests, began)
        control = TrainingControl(setup, stopping, checkpoints, facts)
        train(setup, lambda: evaluation(stopping.is_asked), control)
        saved = checkpoints.close()
        if control.stopped:
            requests.is_met = True
            setup.record.ends(control.stopped)
            return TrainResult(control.stopped, saved, None)
        if control.early.is_over:
            setup.console.say(control.early.sentence())
            setup.record.ends(control.early.sentence())
        return TrainResult(None, saved, _end_with_the_best(setup, control, checkpoints, evaluation))


def _end_with_the_best(
    setup: TrainingSetup, control: TrainingControl, checkpoints: Checkpoints, evaluation: Evaluation
) -> dict[str, Any] | None:
    """Return facts about the best evaluation. With --early_stopping, also load its weights and evaluate them again."""
    early, console = control.early, setup.console
    if early.best is None:
        return None
    best = {"iteration": early.best_iteration, "metric": early.metric, "value": early.best}
    if early.patience is None or early.best_iteration == setup.record.iterations:
        return best
    if not checkpoints.load_best(setup.model, early.best_iteration):  # the disk was full, or somebody deleted it
        console.say(f"the best model, after iteration {early.best_iteration}, could not be kept, so the last one is")
        return best
    metrics = evaluation() or {}
    console.evaluation({"iteration": early.best_iteration} | metrics)
    return best | {"evaluated": metrics}


def leave(result: TrainResult, setup: TrainingSetup) -> int:
    """Print why a run stops before its work is done, and how to resume it; return the exit code.

    Raises UserError, the same on every rank, if it cannot be resumed because nothing is saved.
    """
    iteration = setup.record.iterations
    if result.saved is None:
        raise UserError(
            f"{result.stopped} after iteration {iteration}, and no checkpoint could be saved. Make room in the run's "
            "folder, then start again."
        )
    lost = "" if result.saved == iteration else f"; the newest checkpoint is of iteration {result.saved}"
    how = how_to_go_on(setup.record.folder, setup.config)
    setup.console.say_last(f"{result.stopped} after iteration {iteration}{lost}. {how}")
    return GOES_ON


def publish_record(
    record: RunRecord, comm: Communicator, setting: Mapping[str, Any], files: Mapping[str, Any], keeps_model: bool
) -> None:
    """Give the files of a run that ended well their final names, the summary last. Every rank calls it.

    `setting` are the summary's facts and `files` are as `RunRecord.stage` takes them; both count on rank 0. An earlier
    run's model is deleted unless `keeps_model`. Raises UserError if the disk refuses. An earlier run's record is kept
    until all of the new one is on the disk.
    """
    shares = comm.collect(record.share())
    record.complete()
    if shares is not None:  # on rank 0
        record.stage(dict(setting), shares, files)
    comm.exchange("the whole record is on the disk under temporary names")
    if comm.rank == 0:
        record.remove_old(with_model=not keeps_model)
    comm.exchange("an earlier run's record is deleted")
    record.publish()
    comm.exchange("the rows have their final names")
    if comm.rank == 0:
        record.publish_summary()
