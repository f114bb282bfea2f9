"""The interface of a task for the training loop: its data as examples, the head it needs, and its scores."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data import metrics
from cos598d.data.encoders import ImageForm
from cos598d.data.examples import Examples, encode, spread
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

# What the folder or file of each part may be called; the first one that exists is taken.
NAMES = {"train": ("train", "training"), "dev": ("dev", "val", "valid", "validation", "test"), "test": ("test",)}
Row = tuple[str, str | None, Any]  # the first text, the second or None, the label


@dataclass(frozen=True)
class Scores:
    """An evaluation's official metrics, and the files to keep from it: JSON values by file name."""

    metrics: dict[str, float]
    files: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """One task. Call `find` first: the task remembers where its data are, and takes the classes that the data name.

    name: on the command line. head: "sequence_classification", "question_answering" or "image_classification".
    classes: their names in the order of their numbers; () if labels are numbers (regression), or for spans.
    parts: "train", then those to evaluate on. metric: its official one; the task is ranked by its first name.
    defaults: values of RunConfig's that differ for this task. image_form: of its images; None for texts.
    texts: 2 if examples are pairs of texts, 1 if they are single ones; None if both are possible.
    """

    name: str
    head = "sequence_classification"
    classes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("train", "dev")
    metric = metrics.ACCURACY
    defaults: Mapping[str, Any] = {}
    image_form: ImageForm | None = None
    texts: int | None = None

    @property
    def num_labels(self) -> int:
        """Outputs of the head."""
        return 2 if self.head == "question_answering" else len(self.classes) or 1

    @property
    def tells_classes(self) -> bool:
        """Whether an example belongs to one of several classes, which the data may name later."""
        return bool(self.classes)

    @abstractmethod
    def find(self, data_dir: str | None) -> str:
        """Find the data in --data_dir or where the environment says, and return a phrase for that. Raises UserError."""

    @abstractmethod
    def load(self, part: str, encoder: Any, most: int, limit: int | None = None) -> Examples:
        """One part as examples of at most `most` tokens; `limit` takes that many, spread evenly.

        Raises UserError with the place of anything that does not fit the task.
        """

    def unlabelled(self, encoder: Any, most: int) -> dict[str, Examples]:
        """The test sets of --do_predict, by the ending of their file's name. Their labels mean nothing."""
        return {}

    def widths(self, examples: Examples) -> tuple[int, ...]:
        """The most values per example in each of the model's outputs."""
        return (self.num_labels,)

    def score(self, part: str, outputs: np.ndarray, examples: Examples) -> Scores:
        """The metrics, from the outputs: float (examples, sum of `widths`), in the examples' order."""
        predicted = outputs.argmax(axis=1) if self.classes else outputs.reshape(-1)
        return Scores(self.metric.compute(predicted, examples.labels))


class TextTask(Task):
    """A task whose examples are rows of one text or two, with a class or a number each."""

    tests: Mapping[str, str] = {"": "test"}  # parts without labels, by the ending of their predictions' file

    @abstractmethod
    def rows(self, part: str) -> Sequence[Row]:
        """All rows of a part; "test" has no labels. Raises UserError with the place of what cannot be read."""

    def load(self, part: str, encoder: Any, most: int, limit: int | None = None) -> Examples:
        rows = self.rows(part)
        chosen = [rows[place] for place in spread(len(rows), limit)]
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels = [numbers[label] if numbers else float(label) for _, _, label in chosen]
        kind = np.int64 if numbers else np.float32
        texts = [(first, second) for first, second, _ in chosen]
        return encode(texts, np.array(labels, kind), encoder, most)

    def unlabelled(self, encoder: Any, most: int) -> dict[str, Examples]:
        return {ending: self.encoded(self.rows(part), encoder, most) for ending, part in self.tests.items()}

    def encoded(self, rows: Sequence[Row], encoder: Any, most: int) -> Examples:
        """Rows whose labels are not read."""
        return encode([(a, b) for a, b, _ in rows], np.zeros(len(rows), np.int64), encoder, most)


def predictions_table(
    task: Task, names: Iterable[str], outputs: np.ndarray, with_probability: bool = True, first: str = "index"
) -> str:
    """A table of tab-separated values: each example's name, its class or score, and, if asked, the class's probability.

    `first` is the title of the first column, of names.
    """
    if not task.classes:
        rows = zip(names, outputs, strict=True)
        return "".join([f"{first}\tprediction\n", *(f"{name}\t{row[0]:.3f}\n" for name, row in rows)])
    best = outputs.argmax(axis=1)
    shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    sure = shifted[np.arange(len(best)), best] / shifted.sum(axis=1)
    lines = [f"{first}\tprediction" + ("\tprobability" if with_probability else "")]
    for name, place, probability in zip(names, best, sure, strict=True):
        cells = [printable(name), printable(task.classes[place]), f"{probability:.4f}"]
        lines.append("\t".join(cells if with_probability else cells[:2]))
    return "\n".join(lines) + "\n"


def place_of(data_dir: str | None, variable: str, environ: Mapping[str, str]) -> Path | None:
    """The folder or file that --data_dir or else the variable names; None if neither does. Raises UserError."""
    named = data_dir or environ.get(variable)
    if named and not Path(named).exists():
        flag = "--data_dir" if data_dir else variable
        raise UserError(f"the data folder {named} of {flag} does not exist. Give the folder of the data.")
    return Path(named) if named else None


def fetch_command(name: str) -> str:
    """The command that fetches a data set, for sentences; `name` is the data set's for --tasks."""
    return f"`python download_glue_data.py --data_dir D --tasks {name}`"
