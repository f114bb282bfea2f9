"""One start of a run's training: from where the run is to its end, or until it is asked to stop."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.checkpoints.control import TrainingControl
from cos598d.checkpoints.resume import how_to_go_on
from cos598d.checkpoints.saver import Saving
from cos598d.checkpoints.stopping import EarlyStopping, Stopping
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.evaluate import Evaluation
from cos598d.plan import TrainingSetup
from cos598d.terminal.console import Console
from cos598d.terminal.signals import GOES_ON, Requests
from cos598d.train import train


@dataclass(frozen=True)
class TrainResult:
    """How an attempt ended, the same on every rank.

    stopped: why it was stopped before its work was done; None where it is done. saved: the iteration of the newest
    whole checkpoint; None where there is none. best: which evaluation was the best, JSON for the summary; None of none.
    """

    stopped: str | None
    saved: int | None
    best: dict[str, Any] | None


def attempt(setup: TrainingSetup, evaluation: Evaluation, saving: Saving, began: float) -> TrainResult:
    """Train until the work is done, or until a signal or --max_seconds ask for the end. Every rank calls it.

    Meanwhile the signals of `terminal/signals.ENDING` are only noted. `began` is the moment of time.monotonic() from
    which --max_seconds counts. With --early_stopping the model is the best one afterwards. Raises UserError as `train`
    does, and where no checkpoint can be kept.
    """
    config, record, console = setup.config, setup.record, setup.console
    with Requests() as requests, saving:
        stopping = Stopping(config, setup.comm, requests, began)
        keeper = TrainingControl(config, stopping, saving)
        train(setup, lambda: evaluation(stopping.is_asked), keeper)
        saved = saving.close()
        if keeper.stopped:
            requests.is_met = True
            record.ends(keeper.stopped)
            return TrainResult(keeper.stopped, saved, None)
        if keeper.early.is_over:
            console.say(keeper.early.sentence())
            record.ends(keeper.early.sentence())
        return TrainResult(None, saved, _end_with_the_best(setup, keeper.early, saving, evaluation))


def _end_with_the_best(
    setup: TrainingSetup, early: EarlyStopping, saving: Saving, evaluation: Evaluation
) -> dict[str, Any] | None:
    """Say which evaluation was the best; with --early_stopping give `model` its weights, and evaluate it again."""
    if early.best is None:
        return None
    config, record, console = setup.config, setup.record, setup.console
    best = {"iteration": early.best_iteration, "metric": early.metric, "value": early.best}
    if config.early_stopping is None or early.best_iteration == record.iterations:
        return best
    if not saving.load_best(setup.model, early.best_iteration):  # its disk was full, or somebody took it away
        console.say(f"the best model, after iteration {early.best_iteration}, could not be kept: the last one stays")
        return best
    metrics = evaluation() or {}
    console.evaluation({"iteration": early.best_iteration} | metrics)
    return best | {"evaluated": metrics}


def leave(outcome: TrainResult, output: Path, config: RunConfig, iteration: int, console: Console) -> int:
    """Say why a run stops before its work is done, and how it goes on; return the exit code.

    Raises UserError, the same on every rank, where it cannot go on: nothing is saved.
    """
    if outcome.saved is None:
        raise UserError(f"{outcome.stopped} after iteration {iteration}, and nothing of it could be saved.")
    lost = "" if outcome.saved == iteration else f", and saved as it was after iteration {outcome.saved}"
    console.say_last(f"{outcome.stopped} after iteration {iteration}{lost}: {how_to_go_on(output, config)}.")
    return GOES_ON
