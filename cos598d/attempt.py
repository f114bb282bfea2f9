"""One start of a run: trained from where the run is to its end or until it is asked to stop, and published."""

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
    """How a start of a training ended, the same on every rank.

    stopped: why it was stopped before its work was done; None where it is done. saved: the iteration of the newest
    whole checkpoint; None if there is none. best: which evaluation was the best, JSON for the summary; None of none.
    """

    stopped: str | None
    saved: int | None
    best: dict[str, Any] | None


def train_and_checkpoint(
    setup: TrainingSetup, evaluation: Evaluation, checkpoints: Checkpoints, facts: Mapping[str, Any], began: float
) -> TrainResult:
    """Train until the work is done, or until a signal or --max_seconds ask for the end. Every rank calls it.

    Meanwhile the signals of `terminal/signals.ENDING` are only noted. `facts` are what must not change from one start
    of a run to the next. `began` is the moment of time.monotonic() from which --max_seconds counts. With
    --early_stopping the model is the best one afterwards. Raises UserError as `train` does, and where no checkpoint can
    be kept.
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
    """Name the best evaluation; with --early_stopping give the model its weights, and evaluate it again."""
    early, console = control.early, setup.console
    if early.best is None:
        return None
    best = {"iteration": early.best_iteration, "metric": early.metric, "value": early.best}
    if early.patience is None or early.best_iteration == setup.record.iterations:
        return best
    if not checkpoints.load_best(setup.model, early.best_iteration):  # its disk was full, or somebody took it away
        console.say(f"the best model, after iteration {early.best_iteration}, could not be kept: the last one stays")
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
            f"{result.stopped} after iteration {iteration}, and nothing of it could be saved. Make room in the run's "
            "folder, then start again."
        )
    lost = "" if result.saved == iteration else f", and saved as it was after iteration {result.saved}"
    how = how_to_go_on(setup.record.folder, setup.config)
    setup.console.say_last(f"{result.stopped} after iteration {iteration}{lost}: {how}.")
    return GOES_ON


def publish_record(
    record: RunRecord, comm: Communicator, setting: Mapping[str, Any], files: Mapping[str, Any], keeps_model: bool
) -> None:
    """Give the files of a run that has ended well their names in its folder, the summary last. Every rank calls it.

    `setting` are the summary's facts, `files` as `RunRecord.stage` takes them, both of rank 0. An earlier
    run's model goes unless `keeps_model`. Raises UserError where the disk refuses; an earlier record stands until all
    of this one is on it.
    """
    shares = comm.collect(record.share())
    record.complete()
    if shares is not None:  # on rank 0
        record.stage(dict(setting), shares, files)
    comm.exchange("all of the record is on the disk, whatever it is called")
    if comm.rank == 0:
        record.remove_old(with_model=not keeps_model)
    comm.exchange("an earlier run's is gone")
    record.publish()
    comm.exchange("the rows are there")
    if comm.rank == 0:
        record.publish_summary()
