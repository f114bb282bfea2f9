"""Tasks in tables: GLUE's nine, AG News, and your own texts. Each is a file per part, with named columns."""

import csv
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data import metrics
from cos598d.data.examples import Examples, split
from cos598d.data.task import NAMES, Row, Scores, TextTask, fetch_command, place_of
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

SUFFIXES = (".tsv", ".csv", ".jsonl")
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Table:
    """One task's table.

    folder: its name below GLUE_DIR. texts, label: the names of its one or two text columns, and of the label's.
    labels: as the file has them, in the order of their numbers; () for scores; None: those of the training part.
    columns: the names of all columns, for files without a first line that names them. dev: the parts to evaluate on.
    classes: the labels' names, if they have others. skips: whether a row with too few columns is skipped. QQP's
        training file has about twenty questions that are split by a line break, and every reader of GLUE skips these.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...] | None
    metric: metrics.Metric = metrics.ACCURACY
    columns: tuple[str, ...] = ()
    dev: tuple[str, ...] = ("dev",)
    classes: tuple[str, ...] = ()
    skips: bool = False


_BINARY, _ENTAILMENT, _PAIR = ("0", "1"), ("entailment", "not_entailment"), ("sentence1", "sentence2")
_MNLI = ("contradiction", "entailment", "neutral")
_COLA, _NEWS = ("source", "label", "star", "sentence"), ("class", "title", "text")
_TOPICS = ("World", "Sports", "Business", "Sci/Tech")
TABLES = {
    "cola": Table("CoLA", ("sentence",), "label", _BINARY, metrics.MATTHEWS, columns=_COLA),
    "sst-2": Table("SST-2", ("sentence",), "label", _BINARY),
    "mrpc": Table("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, metrics.ACCURACY_AND_F1),
    "sts-b": Table("STS-B", _PAIR, "score", (), metrics.CORRELATIONS),
    "qqp": Table("QQP", ("question1", "question2"), "is_duplicate", _BINARY, metrics.ACCURACY_AND_F1, skips=True),
    "mnli": Table("MNLI", _PAIR, "gold_label", _MNLI, dev=("dev_matched", "dev_mismatched")),
    "qnli": Table("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
    "rte": Table("RTE", _PAIR, "label", _ENTAILMENT),
    "wnli": Table("WNLI", _PAIR, "label", _BINARY),
    "ag_news": Table("AG_NEWS", _NEWS[1:], "class", ("1", "2", "3", "4"), columns=_NEWS, classes=_TOPICS),
}
GLUE = tuple(name for name in TABLES if name != "ag_news")


class TableTask(TextTask):
    """A table of TABLES, or your own texts with the columns that --text_columns and --label_column name."""

    def __init__(self, name: str, table: Table):
        self.name, self.table, self.metric, self.texts = name, table, table.metric, len(table.texts)
        self._labels, self._files = table.labels or (), dict[str, Path]()
        self.classes, self.parts = table.classes or self._labels, ("train", *table.dev)
        if len(table.dev) > 1:
            self.tests = {"": "test_matched", "_mismatched": "test_mismatched"}

    @property
    def tells_classes(self) -> bool:
        return self.table.labels != ()

    def find(self, data_dir: str | None) -> str:
        """A folder with a file for each part, or with the task's folder; or one file, of which a fifth is "dev"."""
        place = place_of(data_dir, "GLUE_DIR", os.environ)
        if place is None and self.name == "rte":
            sample = Path(str(files("cos598d.data.samples")))
            self._files, self.tests = {part: sample / f"rte-{part}.tsv" for part in self.parts}, {}
            return "the bundled sample"
        if place is None:
            raise UserError(f"No data of {self.name}. {self._how_to_get()}.")
        folder = place / self.table.folder if (place / self.table.folder).is_dir() else place
        there = {file.stem.lower(): file for file in sorted(folder.glob("*")) if file.suffix in SUFFIXES}
        for part in (*self.parts, *self.tests.values()):
            known = [there[name] for name in NAMES.get(part, (part,)) if name in there]
            self._files |= {} if not known else {part: known[0]}
        if place.is_file() and place.suffix in SUFFIXES:
            self._files = {"all": place}
        if not self._files:
            raise UserError(f"{place} has no train{' or '.join(SUFFIXES)} of {self.name}. {self._how_to_get()}.")
        self.tests = {ending: part for ending, part in self.tests.items() if part in self._files}
        if self.table.labels is None:
            labels = {label for _, _, label in read_rows(self._file("train"), self.table)}
            # Whole numbers come in their order, others in the alphabet's.
            order = sorted(labels, key=lambda one: (not one.isdigit(), int(one) if one.isdigit() else 0, one))
            self._labels = self.classes = tuple(order)
            if not 2 <= len(labels) <= MOST_CLASSES:
                column = f"column {self.table.label} has {len(labels)} different labels, not 2 to {MOST_CLASSES}"
                raise UserError(f"{place}: {column}. Name another column with --label_column.")
        return str(folder)

    def rows(self, part: str, file: Path | None = None) -> Sequence[Row]:
        file, is_test = file or self._file(part), part in self.tests.values()
        names = dict(zip(self._labels, self.classes, strict=False))  # no labels: those of a run that predicts
        found = [
            (first, second, names.get(label, label))
            for first, second, label in read_rows(file, self.table, self._labels, has_labels=not is_test)
        ]
        if not found:
            raise UserError(f"{file} has no rows. {self._how_to_get()}.")
        if "all" not in self._files or is_test:
            return found
        return [found[place] for place in split([str(row[2]) for row in found], part)]

    def score(self, part: str, outputs: np.ndarray, examples: Examples) -> Scores:
        found, ending = super().score(part, outputs, examples), part.removeprefix("dev").removesuffix("_matched")
        return Scores({f"{name}{ending}": value for name, value in found.metrics.items()})

    def _file(self, part: str) -> Path:
        found = self._files.get(part) or self._files.get("all")
        if found is None or (part in self.tests.values() and part not in self._files):
            raise UserError(f"{self.name} has no file {part}{' or '.join(SUFFIXES)}. {self._how_to_get()}.")
        return found

    def _how_to_get(self) -> str:
        if self.name not in GLUE:
            return f"Give --data_dir a folder with train and dev files, or one file, that end in {', '.join(SUFFIXES)}"
        fetch = fetch_command(self.table.folder)
        return f"Set --data_dir to its folder, or GLUE_DIR to the one above, or download it with {fetch}"


def read_rows(file: Path, table: Table, labels: Sequence[str] = (), has_labels: bool = True) -> Iterator[Row]:
    """The rows of a file. Raises UserError with file and line for a missing column, an unknown label, or no UTF-8.

    Quotes count in a CSV file, but not in a TSV file, in which a line is a row.
    """
    wanted = (*table.texts, table.label) if has_labels else table.texts
    for line, cells in _cells(file, table, has_labels):
        missing = next((name for name in wanted if cells.get(name) is None), None)
        if missing is not None and table.skips and line > 2:
            continue
        if missing is not None:
            there = printable(", ".join(map(str, cells)), 200)
            raise UserError(f"{file}, line {line}: no column {missing}, only {there}. Correct that line.")
        *texts, label = [_text(cells[name]) for name in wanted] + [""] * (not has_labels)
        shown = printable(repr(label), 100)
        if has_labels and labels and label not in labels:
            raise UserError(f"{file}, line {line}: unknown label {shown}. Use one of {', '.join(labels)}.")
        if has_labels and table.labels == () and not _is_number(label):
            raise UserError(f"{file}, line {line}: the score {shown} is not a number. Correct that line.")
        if has_labels and not label.strip():
            raise UserError(f"{file}, line {line}: no label in {table.label}. Add it, or drop the line.")
        yield texts[0], texts[1] if len(texts) == 2 else None, label


def _cells(file: Path, table: Table, has_labels: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row's line, and its cells by column."""
    lines, names = _lines(file), list(table.columns if has_labels else ())  # test files always name their columns
    number, rows = 0, csv.reader(lines, strict=True)
    try:
        if file.suffix == ".jsonl":
            for number, text in enumerate(lines, start=1):
                if text.strip():
                    yield number, dict(json.loads(text))
            return
        is_csv = file.suffix == ".csv"
        for number, cells in enumerate(rows if is_csv else (one.rstrip("\r\n").split("\t") for one in lines), start=1):
            if cells in ([], [""]):
                continue
            if not names:
                names = [name.strip() for name in cells]
                continue
            if is_csv and len(cells) != len(names):
                raise ValueError(f"{len(cells)} columns, not {len(names)}")
            yield rows.line_num if is_csv else number, dict(zip(names, cells, strict=False))
    except (csv.Error, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}, line {rows.line_num or number}: {error}. Correct that line.") from error


def _lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, with their ends. Raises UserError with the line that is not UTF-8."""
    try:
        with open(file, "rb") as handle:
            for number, raw in enumerate(handle, start=1):
                try:
                    yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = f"byte {raw[error.start]:#04x}"
                    raise UserError(f"{file}, line {number}: {byte} is not UTF-8. Save the file as UTF-8.") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Give a file that can be read.") from error


def _text(value: Any) -> str:
    """A cell as text: JSON's numbers and booleans as JSON writes them."""
    return value if isinstance(value, str) else json.dumps(value)


def _is_number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False
