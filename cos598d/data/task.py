"""What the training loop knows of a task: its data as features, the head it needs, and its scores."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data.encoder import ImageForm
from cos598d.data.examples import Examples
from cos598d.errors import UsageError, UserError


@dataclass(frozen=True)
class Scores:
    """An evaluation's official metrics, and what the task wants kept of it: JSON values by file name."""

    metrics: dict[str, float]
    files: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """One task.

    name: its word on the command line, in lower case.
    head: which of a model type's heads it trains: "sequence_classification", "question_answering" or
        "image_classification".
    num_labels: outputs of the head; 1 for regression. Of a task that finds its classes in the data, when they are
        located.
    evaluation_parts: the parts to evaluate on, in order.
    metrics: the keys of the metrics that every evaluation has, all of them better when larger; the task is ranked by
        the first. One that tells classes apart has `classes.MACRO` next to them.
    classes: the names of its classes by their numbers; of a task that finds them in the data, when these are located.
    model_types: the model types that can do it; None for all that read texts, or images where `image_form` is said.
    defaults: values of RunConfig's that differ for this task.
    options_kind: the dataclass of the flags that only tasks like it have.
    image_form: of a task with images, what these are; None where there are texts.
    texts: 2 where examples are pairs of texts, 1 where they are single ones; None where both may be.

    A `location`, in all methods, is where the data are, as `locate` returned it; an `encoder` is the model's, for texts
    or for images, and features are what `load` returned.
    """

    name: str
    head: str
    num_labels: int
    evaluation_parts: tuple[str, ...]
    metrics: tuple[str, ...] = ("acc",)
    classes: tuple[str, ...] = ()
    model_types: tuple[str, ...] | None = None
    defaults: Mapping[str, Any] = {}
    options_kind: type | None = None
    image_form: ImageForm | None = None
    texts: int | None = None

    @property
    def tells_classes(self) -> bool:
        """Whether an example is of one of several classes."""
        return self.head.endswith("_classification") and self.num_labels != 1

    @abstractmethod
    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Any, str]:
        """Where the data are, from --data_dir or else the environment, and the words that say so.

        Raises UserError if a folder that was named does not hold the task, or if there are no data.
        """

    @abstractmethod
    def check(self, location: Any, parts: Sequence[str] | None = None) -> None:
        """Raise UserError unless the files of `parts` (None: all) are there and not empty."""

    @abstractmethod
    def load(
        self,
        part: str,
        location: Any,
        encoder: Any,
        max_seq_length: int,
        overwrite_cache: bool = False,
        limit: int | None = None,
    ) -> Examples:
        """One part ("train" or one of `evaluation_parts`) as features, of texts at most `max_seq_length` tokens.

        `limit` takes that many examples, spread evenly over the part. Kept in the cache folder and built once
        however many processes ask. Raises UserError naming the place of whatever does not fit the task,
        ValueError for a part that it does not have.
        """

    def test_sets(self, location: Any) -> Mapping[str, Any]:
        """The data without labels that --do_predict predicts, for `unlabelled`, by what their files' names end in."""
        return {}

    def unlabelled(self, source: Any) -> Iterable[tuple[str, tuple[str, ...]]]:
        """The examples of a file without labels: the name of each, and its one or two texts. Raises UserError."""
        raise UsageError(f"{self.name} has no form for --file. Give --text.")

    def remarks(self, part: str, features: Any) -> list[str]:
        """What the user should know of a part's data, a line each."""
        return []

    def output_widths(self, features: Any) -> tuple[int, ...]:
        """How many values at most each of the model's outputs has for an example."""
        return (self.num_labels,)

    def score(self, part: str, outputs: np.ndarray, features: Any) -> Scores:
        """The official metrics, here the accuracy, from the model's outputs.

        outputs: float (examples, sum of `output_widths`), in the features' order; where an output is narrower, the
        rest is zeros.
        """
        return Scores({"acc": float((outputs.argmax(axis=1) == features.labels).mean())})


def fetch_command(name: str) -> str:
    """What fetches a data set, for sentences; `name` is the data set's for --tasks."""
    return f"`python download_glue_data.py --data_dir D --tasks {name}`"


def check_file(file: Path, how_to_get: str) -> None:
    """Raise UserError unless there is something in `file`."""
    if not file.is_file() or file.stat().st_size == 0:
        state = "is empty" if file.is_file() else "is missing"
        raise UserError(f"{file} {state}. {how_to_get}.")


def digest_file(file: Path, kind: str = "sha256") -> tuple[str, int]:
    """A file's digest (sha256 or md5, in hex), and how many lines it has. Raises UserError if it cannot be read."""
    digest, lines = hashlib.new(kind, usedforsecurity=kind != "md5"), 0
    try:
        with open(file, "rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
                lines += block.count(b"\n")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Make it readable.") from error
    return digest.hexdigest(), lines
