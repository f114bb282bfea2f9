"""The nine GLUE tasks' files: the meaning of their columns, and their rows, with errors that name the line."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cos598d.data.glue.metrics import ACCURACY, ACCURACY_AND_F1, CORRELATIONS, MATTHEWS, Metric
from cos598d.data.task import fetch_command
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

_BOM = b"\xef\xbb\xbf"
MOST_LINE_BYTES = 1 << 22  # a line is one example: a longer one is not from a TSV file
_SHOWN = 200  # most characters of a file's text in an error


class GlueRow(NamedTuple):
    """One example as in the file: `line` counts from 1, `identity` names it within its file."""

    line: int
    identity: str
    text_a: str
    text_b: str | None
    label: str


@dataclass(frozen=True)
class Format:
    """One GLUE task in the TSV form in which it is distributed.

    columns: their names, as in the file's first line. MNLI's other files have four more labels before the last
    one: `other_columns`.
    text_a, text_b, label, identity: columns, counted from 0. A label of -1 is in the last column. text_b None means
        single sentences; identity None means that rows are identified by their index.
    metric: its official metrics.
    labels: the classes in the order of their ids; empty for scores (regression).
    dev_parts: the names of the parts to evaluate on; a part's file is PART.tsv.
    has_sample: whether a sample of it is bundled.
    broken_lines: the share of rows with too few columns that is skipped. QQP's training file has about twenty questions
        that are split by a line break (one line in 18,000). Every reader of GLUE skips these.
    """

    name: str
    folder: str
    columns: str
    text_a: int
    text_b: int | None
    label: int
    metric: Metric
    labels: tuple[str, ...] = ("0", "1")
    identity: int | None = 0
    has_header: bool = True
    dev_parts: tuple[str, ...] = ("dev",)
    broken_lines: float = 0.0
    other_columns: str | None = None
    has_sample: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts with labels."""
        return ("train", *self.dev_parts)

    @property
    def width(self) -> int:
        """The fewest columns of a row."""
        return self.columns.count(",") + 1

    def wrong_header(self, cells: Sequence[str]) -> str | None:
        """What is wrong with a file's first line, as a clause; None if it names the task's columns in their order.

        Case and white space around a name do not matter. Nor do columns after the last one, unless it is the label.
        """
        found = [cell.strip().lower() for cell in cells]
        known = [words.split(",") for words in (self.columns, self.other_columns) if words]
        for names in known:
            if [name.lower() for name in names] == (found if self.label < 0 else found[: len(names)]):
                return None
        names = min(known, key=lambda names: abs(len(names) - len(found)))
        return f"the columns are {printable(', '.join(cells), _SHOWN)}, not {self.folder}'s {', '.join(names)}"

    def row(self, cells: Sequence[str], line: int, columns: int | None = None) -> GlueRow | None:
        """One row from its cells; None if there are fewer than the task's (or than `columns`, if given)."""
        if len(cells) < (columns or self.width):
            return None
        identity = str(line - 1) if self.identity is None else cells[self.identity]
        text_b = None if self.text_b is None else cells[self.text_b]
        return GlueRow(line, identity, cells[self.text_a], text_b, cells[self.label])

    def read_unlabelled(self, file: Path | str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each row of a test file, by its columns' names: its identity, which is its first cell, and its texts.

        Raises UserError with file and line for a file without these columns, and for a row with too few cells.
        """
        names = self.columns.lower().split(",")
        wanted = [names[place] for place in (self.text_a, self.text_b) if place is not None]
        head: list[str] = []
        rows = 0
        for line, text in read_lines(file):
            cells = text.split("\t")
            if not head:
                head = [cell.strip().lower() for cell in cells]
                missing = next((name for name in wanted if name not in head), None)
                if missing is not None:
                    there = printable(", ".join(cells), _SHOWN)
                    raise UserError(
                        f"{file}, line 1: no column {missing}, only {there}. Give {self.folder}'s test.tsv."
                    )
            elif text:
                if len(cells) < len(head):
                    raise _too_few(file, line, len(cells), len(head), self)
                rows += 1
                yield cells[0], tuple(cells[head.index(name)] for name in wanted)
        if not rows:
            raise UserError(f"{file} has no rows. Give {self.folder}'s test.tsv.")

    def label_value(self, row: GlueRow, file: Path | str) -> int | float:
        """The row's class id, or its score. Raises UserError naming file and line if the label is neither."""
        if self.labels:
            if row.label in self.labels:
                return self.labels.index(row.label)
            known = ", ".join(self.labels)
            label = printable(row.label, _SHOWN)
            raise UserError(
                f"{file}, line {row.line}: unknown label {label!r}. Use one of the labels of {self.folder}: {known}."
            )
        try:
            score = float(row.label)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            shown = printable(row.label, _SHOWN)
            raise UserError(f"{file}, line {row.line}: the score {shown!r} is not a number. Correct that line.")
        return score


_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES = "index,sentence1,sentence2,label"
_STSB = "index,genre,filename,year,old_index,source1,source2,sentence1,sentence2,score"
_MNLI = (
    "index,promptID,pairID,genre,sentence1_binary_parse,sentence2_binary_parse,sentence1_parse,sentence2_parse,"
    "sentence1,sentence2,label1,gold_label"
)
_MNLI_DEV = _MNLI.replace("label1", "label1,label2,label3,label4,label5")
_MNLI_LABELS = ("contradiction", "entailment", "neutral")
_MNLI_PARTS = ("dev_matched", "dev_mismatched")

FORMATS = {
    item.name: item
    for item in (
        Format("cola", "CoLA", "source,label,star,sentence", 3, None, 1, MATTHEWS, identity=None, has_header=False),
        Format("sst-2", "SST-2", "sentence,label", 0, None, 1, ACCURACY, identity=None),
        Format("mrpc", "MRPC", "Quality,#1 ID,#2 ID,#1 String,#2 String", 3, 4, 0, ACCURACY_AND_F1, identity=None),
        Format("sts-b", "STS-B", _STSB, 7, 8, -1, CORRELATIONS, labels=()),
        Format(
            "qqp", "QQP", "id,qid1,qid2,question1,question2,is_duplicate", 3, 4, 5, ACCURACY_AND_F1, broken_lines=0.001
        ),
        Format(
            *("mnli", "MNLI", _MNLI, 8, 9, -1, ACCURACY),
            labels=_MNLI_LABELS,
            dev_parts=_MNLI_PARTS,
            other_columns=_MNLI_DEV,
        ),
        Format("qnli", "QNLI", "index,question,sentence,label", 1, 2, -1, ACCURACY, labels=_ENTAILMENT),
        Format("rte", "RTE", _SENTENCES, 1, 2, -1, ACCURACY, labels=_ENTAILMENT, has_sample=True),
        Format("wnli", "WNLI", _SENTENCES, 1, 2, -1, ACCURACY),
    )
}


def read_lines(file: Path | str) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1, without BOM and line ends; a few at a time in memory.

    Raises UserError if there is no such file, if it cannot be read, or (with the line) if it is not UTF-8 or longer
    than MOST_LINE_BYTES.
    """
    try:
        with open(file, "rb") as handle:
            lines = iter(lambda: handle.readline(MOST_LINE_BYTES + 1), b"")
            for number, raw in enumerate(lines, start=1):
                if len(raw) > MOST_LINE_BYTES:
                    raise UserError(
                        f"{file}, line {number}: more than {MOST_LINE_BYTES:,} bytes without a line end, but a line "
                        "must be one example. Fix that line, or give a TSV file."
                    )
                if number == 1:
                    raw = raw.removeprefix(_BOM)
                try:
                    yield number, raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{file}, line {number}: byte {error.object[error.start]:#04x} is not UTF-8. "
                        "Save the file as UTF-8."
                    ) from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Give the folder that has it.") from error


def read_rows(file: Path | str, task: Format) -> Iterator[GlueRow]:
    """The rows of one part, read without quoting. Empty lines are skipped; columns after the last are ignored.

    Raises UserError, with file and line, for another header than the task's, a row with too few columns, or no row at
    all.
    """
    columns, awaits_header = task.width, task.has_header
    rows = broken = 0
    first_broken: tuple[int, int] | None = None  # its line and its number of columns
    for line, text in read_lines(file):
        if not text:
            continue
        cells = text.split("\t")
        if awaits_header:
            if len(cells) < columns:
                raise _too_few(file, line, len(cells), columns, task)
            if wrong := task.wrong_header(cells):
                fetch = fetch_command(task.folder)
                raise UserError(
                    f"{file}, line {line}: {wrong}. Give the file with that first line, or download it again ({fetch})."
                )
            if task.label < 0:
                columns = len(cells)  # the label is last: a row without it would show another column's value
            awaits_header = False
            continue
        row = task.row(cells, line, columns)
        if row is None:
            broken += 1
            first_broken = first_broken or (line, len(cells))
            if not task.broken_lines:
                break
        else:
            rows += 1
            yield row
    if first_broken and broken > task.broken_lines * rows:
        raise _too_few(file, *first_broken, columns, task)
    if not rows:
        raise UserError(f"{file} has no rows. Download it again ({fetch_command(task.folder)}).")


def _too_few(file: Path | str, line: int, found: int, columns: int, task: Format) -> UserError:
    has = f"{found} column{'s' * (found != 1)}"
    return UserError(
        f"{file}, line {line}: {has} where {task.folder} needs {columns}, separated by tabs. Fix that line, or "
        f"download the file again ({fetch_command(task.folder)})."
    )
