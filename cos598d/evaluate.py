"""Evaluation over all ranks: the model's outputs for each example exactly once, their metrics and their mean loss."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from cos598d.checkpoint_flags import LOSS_METRIC
from cos598d.comm.group import Ranks
from cos598d.data import Task
from cos598d.data.examples import Examples
from cos598d.data.metrics import MACRO, by_class
from cos598d.data.tables import GLUE
from cos598d.data.task import predictions_table
from cos598d.precision import autocast
from cos598d.records.conventions import EVALUATION


class Evaluation:
    """Computes a task's metrics and mean loss for a model, on every part that the task evaluates. Every rank calls it.

    `files` are the files that the task wants kept of the last evaluation: JSON values by name, on rank 0 only.
    """

    def __init__(
        self,
        task: Task,
        parts: Mapping[str, Examples],
        model: nn.Module,
        ranks: Ranks,
        batch_size: int,
        precision: str,
    ):
        self.files: dict[str, Any] = {}
        self._task, self._parts, self._model, self._ranks = task, dict(parts), model, ranks
        self._batch_size, self._precision = batch_size, precision

    def __call__(self, is_asked_to_end: Callable[[], bool] | None = None) -> dict[str, Any] | None:
        """Return the metrics, losses and seconds of an evaluation, the same on every rank; {} if there are no parts.

        A task of classes adds MACRO, the first part's `by_class` and, with few classes, its `confusion`. Returns None
        if any rank was asked to end meanwhile.
        """
        started, ranks, task = time.perf_counter(), self._ranks, self._task
        found: dict[str, Any] = {}
        for place, (part, examples) in enumerate(self._parts.items()):
            outputs = self.outputs(examples, is_asked_to_end)
            if outputs is None:
                return None
            metrics: dict[str, Any] = {}
            if ranks.rank == 0:
                scores, loss = task.score(part, outputs, examples), mean_loss(outputs, task.widths(examples), examples)
                more = {LOSS_METRIC: loss} if math.isfinite(loss) else {}
                if task.tells_classes:
                    more |= by_class(outputs.argmax(axis=1), examples.labels, task.classes)
                if place:  # a second part's are named as its metrics are: "validation_loss_mismatched"
                    more = {k + part.removeprefix("dev"): v for k, v in more.items() if k in (LOSS_METRIC, *MACRO)}
                metrics = scores.metrics | more
                self.files.update(scores.files)
            found |= ranks.exchange(metrics)[0]
        return found | {"seconds_evaluation": time.perf_counter() - started} if found else {}

    def outputs(self, examples: Examples, is_asked_to_end: Callable[[], bool] | None = None) -> np.ndarray | None:
        """The model's outputs for every example: float32 (examples, sum of widths), in the examples' order.

        The task's widths are the numbers of values per example in each of the model's first outputs. If a batch gives
        fewer, the rest is zeros. Each rank computes every n-th batch, and leaves zeros elsewhere. The sum over ranks is
        then exact, because every row has one rank's numbers and zeros from the others. A rank that is asked to end
        computes no further batch; the result is then None on every rank.
        """
        ranks, model, widths = self._ranks, self._model, self._task.widths(examples)
        was_training = model.training
        model.eval()
        rows = torch.zeros((len(examples), sum(widths)), device=ranks.device)
        order = np.argsort(examples.lengths, kind="stable")  # similar lengths together
        batches = [order[start : start + self._batch_size] for start in range(0, len(order), self._batch_size)]
        with torch.no_grad(), autocast(self._precision, ranks.device):
            for batch in batches[ranks.rank :: ranks.world_size]:
                if is_asked_to_end and is_asked_to_end():
                    break
                inputs = {name: one.to(ranks.device) for name, one in examples.inputs(batch).items()}
                chosen = torch.as_tensor(batch, device=ranks.device)
                for place, output in zip(np.cumsum([0, *widths[:-1]]), model(**inputs), strict=False):
                    values = output.float().reshape(len(batch), -1)
                    rows[chosen, place : place + values.shape[1]] = values
        model.train(was_training)
        if is_asked_to_end and any(ranks.exchange(is_asked_to_end())):
            return None
        with ranks.ledger.naming("model outputs", EVALUATION):
            dist.all_reduce(rows)
        return rows.cpu().numpy()


def mean_loss(outputs: np.ndarray, widths: Sequence[int], examples: Examples) -> float:
    """The mean over all examples of the loss that training minimizes, from the `model_outputs` of `widths`.

    It is the cross entropy for classes and the squared error for scores. For spans, it is the mean of the start's and
    the end's cross entropy over the example's own tokens.
    """
    scores = torch.from_numpy(outputs).double()
    if "labels" in examples.targets:
        labels = torch.from_numpy(examples.labels)
        is_score = labels.is_floating_point()
        return float(mse_loss(scores.flatten(), labels.double()) if is_score else cross_entropy(scores, labels))
    is_padding = torch.arange(widths[0]) >= torch.from_numpy(examples.lengths)[:, None]
    sides = [side.masked_fill(is_padding, -torch.inf) for side in scores.split(list(widths), dim=1)]
    targets = [torch.from_numpy(examples.targets[name]) for name in ("start_positions", "end_positions")]
    return float(cross_entropy(sides[0], targets[0]) + cross_entropy(sides[1], targets[1])) / 2


def predict_tests(task: Task, tests: Mapping[str, Examples], evaluation: Evaluation) -> dict[str, str]:
    """The tables of --do_predict by file name. For GLUE they have the two columns that its benchmark accepts."""
    found = {}
    for name, test in tests.items():
        outputs = evaluation.outputs(test)
        assert outputs is not None  # nobody asks it to stop
        found[name] = predictions_table(task, map(str, range(len(test))), outputs, task.name not in GLUE)
    return found
