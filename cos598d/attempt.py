"""One start of a run's training: from where the run stands to its end, or until it is asked to stop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from cos598d.checkpoints import Checkpoint
from cos598d.checkpoints.control import TrainingControl
from cos598d.checkpoints.saver import Saving
from cos598d.checkpoints.stopping import EarlyStopping, Stopping
from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.data.examples import Examples
from cos598d.evaluate import Evaluation
from cos598d.measure.record import RunRecord
from cos598d.strategies.base import Strategy
from cos598d.terminal.console import Console
from cos598d.terminal.signals import Requests
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


def attempt(
    config: RunConfig,
    comm: Communicator,
    model: nn.Module,
    strategy: Strategy,
    features: Examples,
    evaluation: Evaluation,
    record: RunRecord,
    console: Console,
    describe: Callable[[Path], None],
    facts: Mapping[str, Any],
    found: Checkpoint | None,
    began: float,
) -> TrainResult:
    """Train `model` until the work is done, or until a signal or --max_seconds ask for the end. Every rank calls it.

    Meanwhile the signals of `terminal/signals.ENDING` are only noted. `describe` writes the model's configuration and
    vocabulary into a folder, `facts` must not change from one attempt of a run to the next, `found` is the checkpoint
    to go on from, and `began` is the moment of time.monotonic() from which --max_seconds counts. With --early_stopping
    the model is the best one afterwards. Raises UserError as `train` does, and where no checkpoint can be kept.
    """
    with Requests() as requests, Saving(config, comm, console, record, describe, facts, found) as saving:
        stopping = Stopping(config, comm, requests, began)
        keeper = TrainingControl(config, stopping, saving)
        train(
            model,
            strategy,
            comm,
            features,
            config,
            record,
            console,
            lambda: evaluation(stopping.is_asked),
            keeper,
        )
        saved = saving.close()
        if keeper.stopped:
            requests.is_met = True
            record.ends(keeper.stopped)
            return TrainResult(keeper.stopped, saved, None)
        if keeper.early.is_over:
            console.say(keeper.early.sentence())
            record.ends(keeper.early.sentence())
        return TrainResult(
            None, saved, _end_with_the_best(config, keeper.early, saving, record, evaluation, model, console)
        )


def _end_with_the_best(
    config: RunConfig,
    early: EarlyStopping,
    saving: Saving,
    record: RunRecord,
    evaluation: Evaluation,
    model: nn.Module,
    console: Console,
) -> dict[str, Any] | None:
    """Say which evaluation was the best; with --early_stopping give `model` its weights, and evaluate it again."""
    if early.best is None:
        return None
    best = {"iteration": early.best_iteration, "metric": early.metric, "value": early.best}
    if config.early_stopping is None or early.best_iteration == record.iterations:
        return best
    if not saving.load_best(model, early.best_iteration):  # its disk was full, or somebody took it away
        console.say(f"the best model, after iteration {early.best_iteration}, could not be kept: the last one stays")
        return best
    metrics = evaluation() or {}
    console.evaluation({"iteration": early.best_iteration} | metrics)
    return best | {"evaluated": metrics}
