"""The interface of a task for the training loop: its data as features, the head it needs, and its scores."""

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
    """An evaluation's official metrics, and the files to keep from it: JSON values by file name."""

    metrics: dict[str, float]
    files: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """One task.

    name: its name on the command line, in lower case.
    head: the model's head that it trains: "sequence_classification", "question_answering" or "image_classification".
    num_labels: outputs of the head; 1 for regression. If a task finds its classes in the data, `locate` sets it.
    evaluation_parts: the parts to evaluate on, in order.
    metrics: the keys of the metrics that every evaluation has, all of them better when larger; the task is ranked by
        the first. A task of classes adds `classes.MACRO`.
    classes: the names of its classes by their numbers. If a task finds them in the data, `locate` sets them.
    model_types: the model types that can do it; None for all that read texts, or images if `image_form` is set.
    defaults: values of RunConfig's that differ for this task.
    options_kind: the dataclass of the flags that only tasks of its kind have.
    image_form: the form of a task's images; None for texts.
    texts: 2 if examples are pairs of texts, 1 if they are single ones; None if both are possible.

    In all methods, a `location` is the result of `locate`: where the data are. An `encoder` is the model's, for texts
    or for images. Features are the result of `load`.
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
        """Whether an example belongs to one of several classes."""
        return self.head.endswith("_classification") and self.num_labels != 1

    @abstractmethod
    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Any, str]:
        """Where the data are, from --data_dir or else the environment, and a phrase for that.

        Raises UserError if a named folder does not have the task's data, or if there are no data.
        """

    @abstractmethod
    def check(self, location: Any, parts: Sequence[str] | None = None) -> None:
        """Raise UserError unless the files of `parts` (None: all) exist and are not empty."""

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
        """One part ("train" or one of `evaluation_parts`) as features, from texts of at most `max_seq_length` tokens.

        `limit` takes that many examples, spread evenly over the part. The result is cached, and built only once for all
        processes. Raises UserError with the position of anything that does not fit the task, and ValueError for a part
        that it does not have.
        """

    def test_sets(self, location: Any) -> Mapping[str, Any]:
        """The data without labels that --do_predict predicts, for `unlabelled`, by the suffixes of their files."""
        return {}

    def unlabelled(self, source: Any) -> Iterable[tuple[str, tuple[str, ...]]]:
        """The examples of a file without labels: each one's name, and its one or two texts. Raises UserError."""
        raise UsageError(f"{self.name} has no form for --file. Give --text.")

    def remarks(self, part: str, features: Any) -> list[str]:
        """Facts about a part's data that the user should see, one line each."""
        return []

    def output_widths(self, features: Any) -> tuple[int, ...]:
        """The most values per example in each of the model's outputs."""
        return (self.num_labels,)

    def score(self, part: str, outputs: np.ndarray, features: Any) -> Scores:
        """The official metrics, here the accuracy, from the model's outputs.

        outputs: float (examples, sum of `output_widths`), in the features' order. Narrower outputs are zero-padded.
        """
        return Scores({"acc": float((outputs.argmax(axis=1) == features.labels).mean())})


def fetch_command(name: str) -> str:
    """The command that fetches a data set, for sentences; `name` is the data set's for --tasks."""
    return f"`python download_glue_data.py --data_dir D --tasks {name}`"


def check_file(file: Path, how_to_get: str) -> None:
    """Raise UserError unless `file` has contents."""
    if not file.is_file() or file.stat().st_size == 0:
        state = "is empty" if file.is_file() else "is missing"
        raise UserError(f"{file} {state}. {how_to_get}.")


def digest_file(file: Path, kind: str = "sha256") -> tuple[str, int]:
    """A file's digest (sha256 or md5, in hex), and its number of lines. Raises UserError if it cannot be read."""
    digest, lines = hashlib.new(kind, usedforsecurity=kind != "md5"), 0
    try:
        with open(file, "rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
                lines += block.count(b"\n")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Make it readable.") from error
    return digest.hexdigest(), lines
