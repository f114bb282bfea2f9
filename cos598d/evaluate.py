"""Evaluation over all ranks: the model's outputs for each example exactly once, their metrics and their mean loss."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from cos598d.checkpoint_flags import LOSS_METRIC
from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.data import Task
from cos598d.data.classes import class_scores
from cos598d.data.examples import Examples
from cos598d.data.glue.task import GlueTask
from cos598d.data.sampler import evaluation_batches
from cos598d.data.unlabelled import Unlabelled, table
from cos598d.records.conventions import EVALUATION
from cos598d.strategies.precision import autocast


class Evaluation:
    """Computes a task's metrics and mean loss for a model, on every part that the task evaluates. Every rank calls it.

    `files` are the files that the task wants kept of the last evaluation: JSON values by name, on rank 0 only.
    """

    def __init__(
        self,
        task: Task,
        parts: Mapping[str, Examples],
        model: nn.Module,
        comm: Communicator,
        batch_size: int,
        precision: str,
    ):
        self.files: dict[str, Any] = {}
        self._task, self._parts, self._model, self._comm = task, dict(parts), model, comm
        self._batch_size, self._precision = batch_size, precision

    def __call__(self, is_asked_to_end: Callable[[], bool] | None = None) -> dict[str, Any] | None:
        """Return the metrics, losses and seconds of an evaluation, the same on every rank; {} if there are no parts.

        A task of classes adds MACRO, the first part's `by_class` and, with few classes, its `confusion`. Returns None
        if any rank was asked to end meanwhile, even if its argument differs from other ranks'.
        """
        started, comm = time.perf_counter(), self._comm
        found: dict[str, Any] = {}
        for part, features in self._parts.items():
            widths, context = self._task.output_widths(features), autocast(self._precision, comm.device)
            outputs = model_outputs(self._model, features, widths, comm, self._batch_size, context, is_asked_to_end)
            if outputs is None:
                return None
            metrics: dict[str, Any] = {}
            if comm.rank == 0:
                scores, loss = self._task.score(part, outputs, features), mean_loss(outputs, widths, features)
                # A second part's loss is named as its metrics are: "validation_loss_mismatched".
                name = LOSS_METRIC + ("" if part == next(iter(self._parts)) else part.removeprefix("dev"))
                metrics = scores.metrics | ({name: loss} if math.isfinite(loss) else {})
                metrics |= self._of_classes(outputs, features, part)
                self.files.update(scores.files)
            found |= comm.exchange(metrics)[0]
        return found | {"seconds_evaluation": time.perf_counter() - started} if found else {}

    def _of_classes(self, outputs: np.ndarray, features: Examples, part: str) -> dict[str, Any]:
        """Macro averages for a task of classes. A second part's metrics get its suffix, like its other metrics."""
        if not self._task.tells_classes:
            return {}
        scores = class_scores(outputs.argmax(axis=1), features.labels, self._task.classes)
        if part != next(iter(self._parts)):
            return {name + part.removeprefix("dev"): value for name, value in scores.macro.items()}
        confusion = {"confusion": scores.confusion} if scores.confusion else {}
        return {**scores.macro, "by_class": scores.by_class, **confusion}


def model_outputs(
    model: nn.Module,
    features: Examples,
    widths: Sequence[int],
    comm: Communicator,
    batch_size: int,
    context: contextlib.AbstractContextManager,
    is_asked_to_end: Callable[[], bool] | None = None,
) -> np.ndarray | None:
    """The model's outputs for every example: float32 (examples, sum of `widths`), in the features' order.

    `widths` are the numbers of values per example in each of the model's first outputs. If a batch gives fewer, the
    rest is zeros. Each rank computes every n-th batch, in the `context`, and leaves zeros elsewhere. The sum over ranks
    is then exact, because every row has one rank's numbers and zeros from the others. A rank that is asked to end
    computes no further batch; the result is then None on every rank.
    """
    was_training = model.training
    model.eval()
    rows = torch.zeros((len(features), sum(widths)), device=comm.device)
    places = np.cumsum([0, *widths])
    with torch.no_grad(), context:
        for batch in evaluation_batches(features.lengths, batch_size)[comm.rank :: comm.world_size]:
            if is_asked_to_end and is_asked_to_end():
                break
            inputs = {k: v.to(comm.device) for k, v in features.collate(batch).items() if k not in features.targets}
            chosen = torch.as_tensor(batch, device=comm.device)
            for place, width, output in zip(places, widths, model(**inputs), strict=False):
                values = output.float().reshape(len(batch), -1)
                if values.shape[1] > width:
                    raise ValueError(f"The model gives {values.shape[1]} values for an example, not {width}.")
                rows[chosen, place : place + values.shape[1]] = values
    model.train(was_training)
    if is_asked_to_end and any(comm.exchange(is_asked_to_end())):
        return None
    comm.all_reduce(rows, "model outputs", purpose=EVALUATION)
    return rows.cpu().numpy()


def mean_loss(outputs: np.ndarray, widths: Sequence[int], features: Examples) -> float:
    """The mean over all examples of the loss that training minimizes, from the `model_outputs` of `widths`.

    It is the cross entropy for classes and the squared error for scores. For spans, it is the mean of the start's and
    the end's cross entropy over the example's own tokens. (In a window without the first gold answer, both targets are
    its first token.)
    """
    if "labels" in features.targets:
        if features.labels.dtype.kind == "f":
            return float(np.mean((outputs.reshape(-1).astype(np.float64) - features.labels) ** 2))
        return _cross_entropy(outputs, features.labels, np.full(len(features), outputs.shape[1]))
    begins, ends = np.split(outputs, [widths[0]], axis=1)
    of_begins = _cross_entropy(begins, features.targets["start_positions"], features.lengths)
    return (of_begins + _cross_entropy(ends, features.targets["end_positions"], features.lengths)) / 2


def _cross_entropy(scores: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> float:
    """The mean cross entropy over rows of `scores`; row i counts only its first lengths[i] columns."""
    scores = np.where(np.arange(scores.shape[1]) < lengths[:, None], scores.astype(np.float64), -np.inf)
    scores -= scores.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(scores)), targets]))


def predict(
    model: nn.Module, task: Task, features: Examples, config: RunConfig, comm: Communicator, batch_size: int
) -> np.ndarray:
    """The model's outputs for every example: (examples, sum of the task's output widths). Every rank calls it."""
    widths, context = task.output_widths(features), autocast(config.precision, comm.device)
    found = model_outputs(model, features, widths, comm, batch_size, context)
    assert found is not None  # nobody asks it to stop
    return found


def predict_test_sets(
    model: nn.Module, task: Task, tests: Mapping[str, Unlabelled], config: RunConfig, comm: Communicator
) -> dict[str, str]:
    """The tables of --do_predict by file name. For GLUE they have the two columns that its benchmark accepts."""
    size, with_probability = config.per_gpu_eval_batch_size, not isinstance(task, GlueTask)
    return {
        name: table(test.names, predict(model, task, test.features, config, comm, size), task, with_probability)
        for name, test in tests.items()
    }
