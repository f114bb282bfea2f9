"""GLUE's nine tasks, for the training loop."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.glue import metrics
from cos598d.data.glue import read as glue
from cos598d.data.task import Scores, Task, check_file, digest_file, fetch_command
from cos598d.errors import UserError

if TYPE_CHECKING:
    from cos598d.data.text.encoder import TextEncoder
    from cos598d.data.text.features import Example, Features


class GlueTask(Task):
    """One of GLUE's nine: single sentences or pairs, with a class or a score each.

    A location is the folder of the task's TSV files, or None for the bundled sample.
    """

    head = "sequence_classification"

    def __init__(self, form: glue.Format):
        self.form = form
        self.name = form.name
        self.classes = form.labels
        self.num_labels = len(form.labels) or 1
        self.evaluation_parts = form.dev_parts
        self.metrics = form.metric.names
        self.texts = 1 if form.text_b is None else 2

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Path | None, str]:
        """`data_dir` has train.tsv, or is the folder above it; GLUE_DIR is always the one above."""
        form = self.form
        if data_dir:
            for folder in (Path(data_dir), Path(data_dir) / form.folder):
                if any((folder / f"{part}.tsv").is_file() for part in form.parts):
                    return folder, str(folder)
            problem = "has neither train.tsv nor " + form.folder if Path(data_dir).is_dir() else "is not a folder"
            raise UserError(f"the data folder {data_dir} {problem}. {self._how_to_get()}.")
        glue_dir = environ.get("GLUE_DIR")
        if glue_dir:
            folder = Path(glue_dir) / form.folder
            if not folder.is_dir():
                raise UserError(f"GLUE_DIR is {glue_dir}, which has no folder {form.folder}. {self._how_to_get()}.")
            return folder, f"GLUE_DIR/{form.folder}"
        if form.has_sample:
            return None, "the bundled sample"
        raise UserError(f"No data for {form.folder}. {self._how_to_get()}.")

    def check(self, location: Path | None, parts: Sequence[str] | None = None) -> None:
        if location is None:
            self._refuse_without_sample()
            return
        if not location.is_dir():
            raise UserError(f"There is no folder {location}. Give the one with {self.form.folder}'s train.tsv.")
        for part in self.form.parts if parts is None else parts:
            check_file(location / f"{part}.tsv", self._how_to_mend())

    def load(
        self,
        part: str,
        location: Path | None,
        encoder: "TextEncoder",
        max_seq_length: int,
        overwrite_cache: bool = False,
        limit: int | None = None,
    ) -> "Features":
        from cos598d.data.text.features import load_texts

        if part not in self.form.parts:
            raise ValueError(f"{self.name} has the parts {', '.join(self.form.parts)}, not {part!r}.")
        if location is None:
            self._refuse_without_sample()
            source = f"the bundled sample's {part} part"
            digest, count = _digest_rows(self._sample_rows(part))
        else:
            file = location / f"{part}.tsv"
            check_file(file, self._how_to_mend())
            digest, count = digest_file(file)
            source = str(file)

        def examples() -> Iterator["Example"]:
            rows = self._sample_rows(part) if location is None else glue.read_rows(source, self.form)
            return ((row.text_a, row.text_b, {"labels": self.form.label_value(row, source)}) for row in rows)

        kind = np.int64 if self.form.labels else np.float32
        return load_texts(
            self.name, part, (digest,), examples, encoder, max_seq_length, overwrite_cache, limit, kind, count
        )

    def test_sets(self, location: Path | None) -> dict[str, Path]:
        found = (
            {}
            if location is None
            else {part: location / f"{part.replace('dev', 'test')}.tsv" for part in self.form.dev_parts}
        )
        return {
            part.removeprefix("dev").removesuffix("_matched"): file for part, file in found.items() if file.is_file()
        }

    def unlabelled(self, source: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
        return self.form.read_unlabelled(source)

    def score(self, part: str, outputs: np.ndarray, features: "Features") -> Scores:
        predicted = outputs.argmax(axis=1) if self.form.labels else outputs.reshape(-1)
        found = metrics.score(self.form.metric, predicted, features.labels)
        if part == "dev_mismatched":
            found = {f"{key}_mismatched": value for key, value in found.items()}
        return Scores(found)

    def _how_to_get(self) -> str:
        return (
            "Set --data_dir to its folder or GLUE_DIR to the folder above, or download it with "
            f"{fetch_command(self.form.folder)}"
        )

    def _how_to_mend(self) -> str:
        return f"Download it again with {fetch_command(self.form.folder)}, or give a --data_dir that has it"

    def _refuse_without_sample(self) -> None:
        if not self.form.has_sample:
            raise UserError(f"{self.form.folder} has no bundled sample. {self._how_to_get()}.")

    def _sample_rows(self, part: str) -> Iterator[glue.GlueRow]:
        from cos598d.data.samples import rte_sample

        for line, (first, second, label) in enumerate(rte_sample(part), start=1):
            yield glue.GlueRow(line, str(line - 1), first, second, label)


def _digest_rows(rows: Iterator[glue.GlueRow]) -> tuple[str, int]:
    digest, count = hashlib.sha256(), 0
    for row in rows:
        digest.update(repr(row).encode())
        count += 1
    return digest.hexdigest(), count
