"""GLUE's official metrics, each task's under the names that the original assignment prints."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Metric:
    """names: the keys of the result of `compute(predictions, labels)`; the task is ranked by the first."""

    names: tuple[str, ...]
    compute: Callable[[np.ndarray, np.ndarray], dict[str, float]]


def simple_accuracy(preds: np.ndarray, labels: np.ndarray) -> float:
    """The share of predictions that equal their label. Both (examples,)."""
    return float((np.asarray(preds) == np.asarray(labels)).mean())


def acc_and_f1(preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, F1 of class 1 (0 if no label and no prediction is 1), and their mean. Both (examples,)."""
    from sklearn.metrics import f1_score  # imported here, since it takes half a second that --help should not wait for

    acc = simple_accuracy(preds, labels)
    f1 = float(f1_score(y_true=labels, y_pred=preds, zero_division=0))
    return {"acc": acc, "f1": f1, "acc_and_f1": (acc + f1) / 2}


def matthews(preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Matthews' correlation coefficient; 0 where one class is never predicted. Both (examples,)."""
    from sklearn.metrics import matthews_corrcoef

    return {"mcc": float(matthews_corrcoef(labels, preds))}


def pearson_and_spearman(preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation and their mean. Both (examples,).

    If either side is constant, no correlation is defined. The result is 0 then, since a model with one answer for every
    pair has found none.
    """
    from scipy.stats import pearsonr, spearmanr

    preds, labels = (np.asarray(side, dtype=np.float64).reshape(-1) for side in (preds, labels))
    if np.ptp(preds) == 0 or np.ptp(labels) == 0:
        pearson = spearman = 0.0
    else:
        pearson, spearman = float(pearsonr(preds, labels)[0]), float(spearmanr(preds, labels)[0])
    return {"pearson": pearson, "spearmanr": spearman, "corr": (pearson + spearman) / 2}


def _accuracy(preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return {"acc": simple_accuracy(preds, labels)}


ACCURACY = Metric(("acc",), _accuracy)
ACCURACY_AND_F1 = Metric(("acc_and_f1", "acc", "f1"), acc_and_f1)
MATTHEWS = Metric(("mcc",), matthews)
CORRELATIONS = Metric(("corr", "pearson", "spearmanr"), pearson_and_spearman)


def score(metric: Metric, preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """A task's official metrics. preds, labels: (examples,), class ids or scores. Raises ValueError if they differ in
    length or are empty."""
    if len(preds) != len(labels) or len(preds) == 0:
        raise ValueError(f"{len(preds)} predictions for {len(labels)} labels: there must be one per label.")
    return metric.compute(preds, labels)
