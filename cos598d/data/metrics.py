"""GLUE's official metrics, each task's under the names that the original assignment prints, and scores by class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MACRO = ("precision_macro", "recall_macro", "f1_macro")
MOST_CONFUSED = 20  # with more classes there is no confusion matrix


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
    from sklearn.metrics import f1_score  # takes half a second that --help should not wait for

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
        return {"pearson": 0.0, "spearmanr": 0.0, "corr": 0.0}
    pearson, spearman = float(pearsonr(preds, labels)[0]), float(spearmanr(preds, labels)[0])
    return {"pearson": pearson, "spearmanr": spearman, "corr": (pearson + spearman) / 2}


ACCURACY = Metric(("acc",), lambda preds, labels: {"acc": simple_accuracy(preds, labels)})
ACCURACY_AND_F1 = Metric(("acc_and_f1", "acc", "f1"), acc_and_f1)
MATTHEWS = Metric(("mcc",), matthews)
CORRELATIONS = Metric(("corr", "pearson", "spearmanr"), pearson_and_spearman)


def by_class(preds: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Precision, recall and F1 of each class, their means (MACRO), and for few classes the confusion matrix.

    preds, labels: int (examples,). Precision is the share of a class's predictions that are right; recall is the share
    of its examples that were found; F1 is their harmonic mean. Each is 0 if it would divide by 0. The means are over
    the classes that occur. Row i column j of `confusion` has the number of examples of class i that were taken for j.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    ids = np.arange(len(names))
    *scores, counts = precision_recall_fscore_support(labels, preds, labels=ids, zero_division=0)
    occurs = np.isin(ids, np.union1d(preds, labels))
    found: dict[str, Any] = {name: float(of[occurs].mean()) for name, of in zip(MACRO, scores, strict=True)}
    columns = zip(names, counts.tolist(), *(of.tolist() for of in scores), strict=True)
    keys = ("class", "examples", "precision", "recall", "f1")
    found["by_class"] = [dict(zip(keys, row, strict=True)) for row in columns]
    if len(names) <= MOST_CONFUSED:
        found["confusion"] = confusion_matrix(labels, preds, labels=ids).tolist()
    return found
