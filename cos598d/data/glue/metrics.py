"""GLUE's official metrics, each task's under the names that the course prints."""

import numpy as np


def simple_accuracy(preds: np.ndarray, labels: np.ndarray) -> float:
    """The share of predictions that equal their label. Both (examples,)."""
    return float((np.asarray(preds) == np.asarray(labels)).mean())


def acc_and_f1(preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, F1 of class 1 (0 where no label and no prediction is 1), and their mean. Both (examples,)."""
    from sklearn.metrics import f1_score  # imported where needed: half a second that --help need not wait for

    acc = simple_accuracy(preds, labels)
    f1 = float(f1_score(y_true=labels, y_pred=preds, zero_division=0))
    return {"acc": acc, "f1": f1, "acc_and_f1": (acc + f1) / 2}


def matthews(preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Matthews' correlation coefficient; 0 where one class is never predicted. Both (examples,)."""
    from sklearn.metrics import matthews_corrcoef

    return {"mcc": float(matthews_corrcoef(labels, preds))}


def pearson_and_spearman(preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation and their mean. Both (examples,).

    Where either side is constant no correlation is defined: 0 is given, since a model that says the same of
    every pair has found none.
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


_METRICS = {"cola": matthews, "mrpc": acc_and_f1, "qqp": acc_and_f1, "sts-b": pearson_and_spearman}
_METRICS |= dict.fromkeys(("sst-2", "mnli", "mnli-mm", "qnli", "rte", "wnli"), _accuracy)
# The one number that a task is ranked by first.
NAMES = {
    matthews: ("mcc",),
    acc_and_f1: ("acc_and_f1", "acc", "f1"),
    pearson_and_spearman: ("corr", "pearson", "spearmanr"),
    _accuracy: ("acc",),
}


def compute_metrics(task_name: str, preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The official metrics of a GLUE task ("mnli-mm" for MNLI's mismatched set).

    preds, labels: (examples,), class ids, or scores for "sts-b".
    Raises KeyError for an unknown task, ValueError if the two differ in length or are empty.
    """
    if len(preds) != len(labels) or len(preds) == 0:
        raise ValueError(f"{len(preds)} predictions for {len(labels)} labels: there should be one for each.")
    return _METRICS[task_name](preds, labels)


def metric_names(task_name: str) -> tuple[str, ...]:
    """The keys of what `compute_metrics` gives; the one that a task is ranked by comes first."""
    return NAMES[_METRICS[task_name]]
