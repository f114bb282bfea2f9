"""Examples without labels, and the table of what a model says of them: `cos598d predict`, and --do_predict."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cos598d.data.examples import Examples
from cos598d.data.task import Task
from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.features import build_features
from cos598d.terminal.printable import printable


class Unlabelled(NamedTuple):
    """Examples without labels: their names and their features. The labels in the features mean nothing."""

    names: Sequence[str]
    features: Examples


def read_texts(rows: Iterable[tuple[str, tuple[str, ...]]], encoder: TextEncoder, max_seq_length: int) -> Unlabelled:
    """The features of named texts; each row has one text or two."""
    found = list(rows)
    examples = ((texts[0], texts[1] if len(texts) > 1 else None, {"labels": 0}) for _, texts in found)
    features = build_features(examples, encoder, max_seq_length, {"labels": np.int64})
    return Unlabelled([name for name, _ in found], features)


def table(
    names: Sequence[str], outputs: np.ndarray, task: Task, with_probability: bool = True, first: str = "index"
) -> str:
    """A table of tab-separated values: each example's name, its class or score, and, if asked, the class's probability.

    `first` is the title of the first column, of names.
    """
    if not task.tells_classes:
        rows = zip(names, outputs, strict=True)
        return "".join([f"{first}\tprediction\n", *(f"{name}\t{row[0]:.3f}\n" for name, row in rows)])
    best = outputs.argmax(axis=1)
    shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    sure = shifted[np.arange(len(best)), best] / shifted.sum(axis=1)
    lines = [f"{first}\tprediction" + ("\tprobability" if with_probability else "")]
    for name, place, probability in zip(names, best, sure, strict=True):
        cells = [printable(name), printable(task.classes[place])]
        lines.append("\t".join([*cells, *([f"{probability:.4f}"] if with_probability else [])]))
    return "\n".join(lines) + "\n"
