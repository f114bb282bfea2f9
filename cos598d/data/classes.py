"""How well classes are told apart: precision, recall and F1 of each and of all, and which are taken for which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MACRO = ("precision_macro", "recall_macro", "f1_macro")
MOST_CONFUSED = 20  # so many classes at most have their table of which was taken for which


@dataclass(frozen=True)
class ClassScores:
    """macro: the means of MACRO over the classes that occur in labels or predictions, each class counting alike.

    by_class: of each class, in order, its name, its examples, and its precision, recall and F1.
    confusion: row i column j has the examples of class i that were taken for class j; None where classes are many.
    """

    macro: Mapping[str, float]
    by_class: list[dict[str, Any]]
    confusion: list[list[int]] | None


def class_scores(predicted: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> ClassScores:
    """The scores of predictions, both int (examples,), of the classes called `names`.

    Precision is the share of what was taken for a class that is of it, recall the share of the class that was found,
    F1 their harmonic mean; each is 0 where it would divide by 0, as in scikit-learn with zero_division=0.
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
