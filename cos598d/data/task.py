"""What the training loop knows of a task: its data as features, the head it needs, and its metrics."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data import glue, metrics
from cos598d.errors import UsageError, UserError

if TYPE_CHECKING:
    from cos598d.data.features import Features
    from cos598d.data.tokenization import TextEncoder

_SAMPLED = ("rte",)  # the tasks with a bundled sample


class Task(ABC):
    """One task.

    name: its word on the command line, in lower case.
    head: which of a model type's heads it trains, "sequence_classification" or "question_answering".
    num_labels: outputs of the head; 1 for regression.
    evaluation_parts: the parts to evaluate on, in order.
    main_metric: the key of `metrics` that the task is ranked by.
    """

    name: str
    head: str
    num_labels: int
    evaluation_parts: tuple[str, ...]
    main_metric: str

    @abstractmethod
    def check(self, folder: Path | None) -> None:
        """Raise UserError unless the files of all parts are in `folder` and not empty; None is the bundled sample."""

    @abstractmethod
    def load(
        self,
        part: str,
        folder: Path | None,
        encoder: "TextEncoder",
        max_seq_length: int,
        overwrite_cache: bool = False,
    ) -> "Features":
        """One part ("train" or one of `evaluation_parts`) as features of at most `max_seq_length` tokens.

        Kept in the cache folder and built once however many processes ask. Raises UserError naming file and line
        for rows that the task cannot have, ValueError for a part that it has not.
        """

    @abstractmethod
    def metrics(self, part: str, outputs: np.ndarray, features: "Features") -> dict[str, float]:
        """The official metrics from the head's outputs, float (examples, num_labels), in the features' order."""


class GlueTask(Task):
    """One of GLUE's nine: single sentences or pairs, with a class or a score each."""

    head = "sequence_classification"

    def __init__(self, form: glue.Format):
        self.form = form
        self.name = form.name
        self.num_labels = len(form.labels) or 1
        self.evaluation_parts = form.dev_parts
        self.main_metric = metrics.main_metric(form.name)

    def check(self, folder: Path | None) -> None:
        if folder is None:
            self._refuse_without_sample()
            return
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}: give the one that holds {self.form.folder}'s train.tsv.")
        for part in self.form.parts:
            self._check_file(folder / f"{part}.tsv")

    def load(
        self,
        part: str,
        folder: Path | None,
        encoder: "TextEncoder",
        max_seq_length: int,
        overwrite_cache: bool = False,
    ) -> "Features":
        from cos598d.data.features import build_features, cached_features

        if part not in self.form.parts:
            raise ValueError(f"{self.name} has the parts {', '.join(self.form.parts)}, not {part!r}.")
        if folder is None:
            self._refuse_without_sample()
            file = f"the bundled sample's {part} part"
            digest, count = _digest_rows(self._sample_rows(part))
        else:
            file = folder / f"{part}.tsv"
            self._check_file(file)
            digest, count = _digest_file(file)

        def build() -> "Features":
            from tqdm import tqdm

            rows = self._sample_rows(part) if folder is None else glue.read_rows(file, self.form)
            # A bar only where somebody watches, and only for files that take a while.
            seen = tqdm(rows, f"{self.name} {part}: features", count, unit=" rows", delay=2, disable=None, leave=False)
            examples = ((row.text_a, row.text_b, {"labels": self.form.label_value(row, file)}) for row in seen)
            kind = np.int64 if self.form.labels else np.float32
            return build_features(examples, encoder, max_seq_length, {"labels": kind})

        key = (self.name, part, digest, str(max_seq_length))
        return cached_features(f"{self.name}-{part}", key, build, encoder, overwrite_cache)

    def metrics(self, part: str, outputs: np.ndarray, features: "Features") -> dict[str, float]:
        predicted = outputs.argmax(axis=1) if self.form.labels else outputs.reshape(-1)
        found = metrics.compute_metrics(self.name, predicted, features.labels)
        return {f"{key}_mismatched": value for key, value in found.items()} if part == "dev_mismatched" else found

    def _check_file(self, file: Path) -> None:
        if not file.is_file() or file.stat().st_size == 0:
            state = "is empty" if file.is_file() else "is missing"
            raise UserError(f"{file} {state}: {_how_to_get(self.form)}.")

    def _refuse_without_sample(self) -> None:
        if self.name not in _SAMPLED:
            raise UserError(f"{self.form.folder} has no bundled sample: {_how_to_get(self.form)}.")

    def _sample_rows(self, part: str) -> Iterator[glue.Row]:
        from cos598d.data.sample import rte_sample

        for line, (first, second, label) in enumerate(rte_sample(part), start=1):
            yield glue.Row(line, str(line - 1), first, second, label)


_TASKS: dict[str, Task] = {name: GlueTask(form) for name, form in glue.FORMATS.items()}
TASK_NAMES: tuple[str, ...] = tuple(_TASKS)


def get_task(name: str) -> Task:
    """The task of that name, in upper or lower case. Raises UserError that lists the known ones."""
    task = _TASKS.get(name.lower())
    if task is None:
        raise UsageError(f"unknown task {name!r}: choose one of {', '.join(TASK_NAMES)}.")
    return task


def locate_data(task: str, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Path | None, str]:
    """Where a task's files are, and the words that say so.

    data_dir: the folder that holds train.tsv, or the one above it, which holds e.g. RTE/. Without it GLUE_DIR counts,
    which is always the one above. With neither, RTE has a bundled sample: None.
    Raises UserError if a folder that was named does not hold the task, or if the task has no sample.
    """
    form = glue.FORMATS[get_task(task).name]
    if data_dir:
        for folder in (Path(data_dir), Path(data_dir) / form.folder):
            if any((folder / f"{part}.tsv").is_file() for part in form.parts):
                return folder, str(folder)
        problem = "holds neither train.tsv nor " + form.folder if Path(data_dir).is_dir() else "is no folder"
        raise UserError(f"The data folder {data_dir} {problem}: {_how_to_get(form)}.")
    glue_dir = environ.get("GLUE_DIR")
    if glue_dir:
        folder = Path(glue_dir) / form.folder
        if not folder.is_dir():
            raise UserError(f"GLUE_DIR is {glue_dir}, which has no folder {form.folder}: {_how_to_get(form)}.")
        return folder, f"GLUE_DIR/{form.folder}"
    if form.name in _SAMPLED:
        return None, "the bundled sample"
    raise UserError(f"No data for {form.folder}: {_how_to_get(form)}.")


def _how_to_get(form: glue.Format) -> str:
    return (
        "name its folder with --data_dir or the folder above with GLUE_DIR, or fetch it with "
        f"`python download_glue_data.py --data_dir D --tasks {form.folder}`"
    )


def _digest_file(file: Path) -> tuple[str, int]:
    """A digest of a file's bytes, and how many lines it has. Raises UserError if it cannot be read."""
    digest, lines = hashlib.sha256(), 0
    try:
        with open(file, "rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
                lines += block.count(b"\n")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): make it readable.") from error
    return digest.hexdigest(), lines


def _digest_rows(rows: Iterator[glue.Row]) -> tuple[str, int]:
    digest, count = hashlib.sha256(), 0
    for row in rows:
        digest.update(repr(row).encode())
        count += 1
    return digest.hexdigest(), count
