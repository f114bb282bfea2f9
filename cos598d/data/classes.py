"""How well classes are recognized: precision, recall and F1 of each and of all, and a confusion matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MACRO = ("precision_macro", "recall_macro", "f1_macro")
MOST_CONFUSED = 20  # with more classes there is no confusion matrix


@dataclass(frozen=True)
class ClassScores:
    """macro: the means of MACRO over the classes that occur in labels or predictions, with equal weights.

    by_class: for each class, in order, its name, its number of examples, and its precision, recall and F1.
    confusion: row i column j has the number of examples of class i that were taken for class j; None for many classes.
    """

    macro: Mapping[str, float]
    by_class: list[dict[str, Any]]
    confusion: list[list[int]] | None


def class_scores(predicted: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> ClassScores:
    """The scores of predictions, both int (examples,), for the classes `names`.

    Precision is the share of a class's predictions that are right; recall is the share of its examples that were found;
    F1 is their harmonic mean. Each is 0 if it would divide by 0, as in scikit-learn with zero_division=0.
    """
    count = len(names)
    confusion = np.bincount(labels * count + predicted, minlength=count * count).reshape(count, count)
    right, there, taken = np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall = right / np.maximum(taken, 1), right / np.maximum(there, 1)
    f1 = 2 * right / np.maximum(there + taken, 1)
    occurs = there + taken > 0
    columns = dict(zip(MACRO, (precision, recall, f1), strict=True))
    by_class = [
        {
            "class": name,
            "examples": int(there[place]),
            **{key.removesuffix("_macro"): float(values[place]) for key, values in columns.items()},
        }
        for place, name in enumerate(names)
    ]
    return ClassScores(
        {key: float(values[occurs].mean()) for key, values in columns.items()},
        by_class,
        confusion.tolist() if count <= MOST_CONFUSED else None,
    )
