"""Your own texts with a class each: CSV, TSV or JSON lines, whose columns you name."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cos598d.data.examples import split
from cos598d.data.task import Task, check_file, digest_file
from cos598d.errors import UserError
from cos598d.terminal.fields import flag
from cos598d.terminal.printable import printable

if TYPE_CHECKING:
    from cos598d.data.text.encoder import TextEncoder
    from cos598d.data.text.features import Example, Features

SUFFIXES = (".csv", ".tsv", ".jsonl")
TRAIN = ("train", "training")
DEV = ("dev", "val", "valid", "validation", "test")  # the first one that exists is evaluated on
MOST_CLASSES = 1000
OWN_TEXTS = "your own texts"
_SHOWN = 100  # most characters of a file's text in an error
_WANTED = f"Give a folder with train and dev files, or one file, that end in {', '.join(SUFFIXES)}"


@dataclass(frozen=True)
class TextOptions:
    """The flags for your own texts only."""

    text_columns: str = flag(
        "text",
        "the column of the text, or two for pairs, such as premise,hypothesis",
        group=OWN_TEXTS,
        metavar="NAME[,NAME]",
    )
    label_column: str = flag("label", "the column of the class", group=OWN_TEXTS)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the one or two columns of text. Raises UserError for any other number."""
        names = tuple(name.strip() for name in self.text_columns.split(","))
        if not all(names) or len(names) > 2:
            raise UserError(f"--text_columns {printable(self.text_columns, _SHOWN)} has to be one or two names.")
        return names


class TextRow(NamedTuple):
    """One example of a file: its line, its one or two texts, and its label as written; None if labels are not read."""

    line: int
    texts: tuple[str, ...]
    label: str | None


class FoundTexts(NamedTuple):
    """The file of each part, or one file for "all", which is then divided; and the classes of the training part."""

    files: Mapping[str, Path]
    classes: tuple[str, ...]


class TextTask(Task):
    """Reads a folder with train.csv and dev.csv (or .tsv or .jsonl; dev may be called val, valid, validation or test),
    or one file, of which a fixed fifth of each class is evaluated on. The classes are the training labels, in order."""

    name = "text"
    head = "sequence_classification"
    num_labels = 0  # until the texts are located
    evaluation_parts = ("dev",)
    options_kind = TextOptions

    def __init__(self, options: TextOptions):
        self.options = options
        self.texts = len(options.columns)

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[FoundTexts, str]:
        if not data_dir:
            raise UserError(f"--task_name text needs --data_dir. {_WANTED}.")
        files = _find_files(Path(data_dir))
        labels = {row.label or "" for row in read_rows(files.get("train", files.get("all", Path())), self.options)}
        if not 2 <= len(labels) <= MOST_CLASSES:
            raise UserError(
                f"{data_dir}: column {self.options.label_column} has {len(labels)} different labels to train on, but a "
                f"text task has 2 to {MOST_CLASSES}. Name another column with --label_column."
            )
        self.classes = tuple(sorted(labels, key=_in_order))
        self.num_labels = len(self.classes)
        return FoundTexts(files, self.classes), str(data_dir)

    def check(self, location: FoundTexts, parts: Sequence[str] | None = None) -> None:
        for file in location.files.values():
            check_file(file, _WANTED)

    def load(
        self,
        part: str,
        location: FoundTexts,
        encoder: "TextEncoder",
        max_seq_length: int,
        overwrite_cache: bool = False,
        limit: int | None = None,
    ) -> "Features":
        from cos598d.data.text.features import load_texts

        if part not in ("train", *self.evaluation_parts):
            raise ValueError(f"{self.name} has the parts train and dev, not {part!r}.")
        file = location.files.get(part) or location.files["all"]
        numbers = {label: number for number, label in enumerate(location.classes)}

        def examples() -> Iterator["Example"]:
            rows = list(read_rows(file, self.options))
            for row in rows:
                if row.label not in numbers:
                    raise UserError(
                        f"{file}, line {row.line}: the label {printable(repr(row.label), _SHOWN)} is not among the "
                        f"{len(numbers)} of the training part: correct it, or add examples of it to train on."
                    )
            labels = [numbers[row.label or ""] for row in rows]
            places = range(len(rows)) if part in location.files else split(labels, part)
            return ((*_pair(rows[place].texts), {"labels": labels[place]}) for place in places)

        digest, _ = digest_file(file)
        key = (digest, file.suffix, part if part in location.files else "all", *location.classes, *self._columns)
        return load_texts(self.name, part, key, examples, encoder, max_seq_length, overwrite_cache, limit)

    def test_sets(self, location: FoundTexts) -> dict[str, Path]:
        folder = location.files["train"].parent if "train" in location.files else None
        found = [] if folder is None else [folder / f"test{suffix}" for suffix in SUFFIXES]
        return next(({"": file} for file in found if file.is_file()), {})

    def unlabelled(self, source: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
        rows = read_rows(source, self.options, with_labels=False)
        return ((str(place), row.texts) for place, row in enumerate(rows))

    @property
    def _columns(self) -> tuple[str, ...]:
        return (self.options.text_columns, self.options.label_column)

    def remarks(self, part: str, features: Any) -> list[str]:
        counts = np.bincount(features.labels, minlength=self.num_labels)
        each = ", ".join(f"{printable(name, 40)} {count:,}" for name, count in zip(self.classes, counts, strict=True))
        words = f"{part}: {len(features):,} texts of {self.num_labels} classes"
        return [f"{words}: {each}" if len(each) < 200 else words]


def _find_files(path: Path) -> dict[str, Path]:
    """The files of "train" and "dev", or of "all". Raises UserError unless there is one of each."""
    if path.is_file() and path.suffix in SUFFIXES:
        return {"all": path}
    if not path.is_dir():
        raise UserError(f"--data_dir {path} is neither a folder nor a {' or '.join(SUFFIXES)} file. {_WANTED}.")
    there = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    by_name = {names: [file for file in there if file.stem.lower() in names] for names in (TRAIN, DEV)}
    dev = min(by_name[DEV], key=lambda file: DEV.index(file.stem.lower()), default=None)
    if len(by_name[TRAIN]) == 1 and dev is not None:
        return {"train": by_name[TRAIN][0], "dev": dev}
    if len(there) == 1:
        return {"all": there[0]}
    names = printable(", ".join(file.name for file in there), _SHOWN) or "no such file"
    raise UserError(f"--data_dir {path} has {names}, and it is not clear what to train on. {_WANTED}.")


def read_rows(file: Path, options: TextOptions, with_labels: bool = True) -> Iterator[TextRow]:
    """The rows of a file. Raises UserError with file and line if a row cannot be read or a column is missing.

    Quotes count in a CSV file, but not in a TSV file, in which a line is a row. Without `with_labels` the column of the
    labels may be missing.
    """
    wanted = (*options.columns, *([options.label_column] if with_labels else []))
    reader = _json_rows if file.suffix == ".jsonl" else _csv_rows
    count = 0
    try:
        with open(file, encoding="utf-8-sig", newline="" if file.suffix == ".csv" else None) as lines:
            for line, cells in reader(file, lines):
                missing = next((name for name in wanted if name not in cells), None)
                if missing is not None:
                    there = printable(", ".join(map(str, cells)), _SHOWN)
                    flag_of = "--label_column" if missing == options.label_column else "--text_columns"
                    raise UserError(f"{file}, line {line}: no column {missing}, only {there}. Name one with {flag_of}.")
                *texts, label = [_as_text(cells[name], file, line, name) for name in wanted] + [""] * (not with_labels)
                if with_labels and not label.strip():
                    raise UserError(
                        f"{file}, line {line}: no label in {options.label_column}. Add it, or drop the line."
                    )
                count += 1
                yield TextRow(line, tuple(texts), label if with_labels else None)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Make it readable.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.object[error.start]:#04x}). Save it as UTF-8.") from error
    if not count:
        raise UserError(f"{file} has no rows. {_WANTED}.")


def _csv_rows(file: Path, lines: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    is_csv = file.suffix == ".csv"
    rows = csv.reader(lines, strict=True) if is_csv else csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        head = next(rows, [])
        for row in rows:
            if row and len(row) != len(head):
                raise UserError(
                    f"{file}, line {rows.line_num}: {len(row)} columns, but the first line has {len(head)}. Correct "
                    f"that line{', or quote a text with a comma in it' if is_csv else ''}."
                )
            if row:
                yield rows.line_num, dict(zip(head, row, strict=True))
    except csv.Error as error:
        raise UserError(f"{file}, line {rows.line_num}: {error}. Correct that line.") from error


def _json_rows(file: Path, lines: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: it is not JSON ({error}). Correct that line.") from None
        if value is None:
            continue
        if not isinstance(value, dict):
            raise UserError(f"{file}, line {number}: it is not an object with columns by name. Correct that line.")
        yield number, value


def _as_text(value: Any, file: Path, line: int, column: str) -> str:
    """A cell as text: JSON's numbers and booleans as JSON writes them."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    shown = printable(repr(value), 40)
    raise UserError(f"{file}, line {line}: {column} is {shown}. Give a text or a number.")


def _in_order(label: str) -> tuple[bool, int, str]:
    """A sort key: whole numbers by size, then other labels alphabetically."""
    digits = label.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) < 19
    return not is_number, int(label) if is_number else 0, label


def _pair(texts: tuple[str, ...]) -> tuple[str, str | None]:
    return texts[0], texts[1] if len(texts) > 1 else None
