"""AG News: the topic of a news item, from its title and its description."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cos598d.data.examples import split
from cos598d.data.task import Task, check_file, digest_file
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

if TYPE_CHECKING:
    from cos598d.data.text.encoder import TextEncoder
    from cos598d.data.text.features import Example, Features

VARIABLE = "AG_NEWS_DIR"
_FILES = {"train": "train.csv", "dev": "test.csv"}
_HOW_TO_GET = (
    f"Set --data_dir or {VARIABLE} to the folder of AG News' train.csv and test.csv (test.csv is enough to evaluate)"
)


class Item(NamedTuple):
    """One news item; `label` counts from 0."""

    label: int
    title: str
    description: str


class AgNewsTask(Task):
    """News items of four topics (Zhang, Zhao and LeCun 2015): 120,000 to train on and 7,600 to evaluate on.

    Title and description are a pair of texts. If train.csv is missing, a fixed fifth of each class of test.csv is
    evaluated on, and the rest is trained on. A location is the folder.
    """

    name = "ag_news"
    head = "sequence_classification"
    classes = ("World", "Sports", "Business", "Sci/Tech")
    num_labels = len(classes)
    evaluation_parts = ("dev",)

    def __init__(self, options: object = None):
        """Takes the flags of tasks, like every task of the registry, but has none of its own."""

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Path, str]:
        named = data_dir or environ.get(VARIABLE)
        if not named or not (Path(named) / _FILES["dev"]).is_file():
            raise UserError(f"{'No AG News' if not named else f'{named} has no test.csv'}. {_HOW_TO_GET}.")
        return Path(named), data_dir or VARIABLE

    def check(self, location: Path, parts: Sequence[str] | None = None) -> None:
        for part in parts or _FILES:
            check_file(self._file(part, location)[0], _HOW_TO_GET)

    def load(
        self,
        part: str,
        location: Path,
        encoder: "TextEncoder",
        max_seq_length: int,
        overwrite_cache: bool = False,
        limit: int | None = None,
    ) -> "Features":
        from cos598d.data.text.features import load_texts

        if part not in _FILES:
            raise ValueError(f"{self.name} has the parts {', '.join(_FILES)}, not {part!r}.")
        file, is_divided = self._file(part, location)
        check_file(file, _HOW_TO_GET)
        digest, _ = digest_file(file)

        def examples() -> Iterator["Example"]:
            items = list(read_items(file))
            if not items:
                raise UserError(f"{file} has no rows. {_HOW_TO_GET}.")
            places = np.arange(len(items)) if is_divided else split([item.label for item in items], part)
            chosen = (items[place] for place in places)
            return ((item.title, item.description, {"labels": item.label}) for item in chosen)

        key = (digest, str(is_divided))
        return load_texts(self.name, part, key, examples, encoder, max_seq_length, overwrite_cache, limit)

    @staticmethod
    def _file(part: str, folder: Path) -> tuple[Path, bool]:
        """The file with a part, and whether it has nothing else."""
        has_both = (folder / _FILES["train"]).is_file()
        return folder / _FILES[part if has_both else "dev"], has_both


def read_items(file: Path) -> Iterator[Item]:
    """The rows of a CSV file: class from 1 to 4, title, description. Backslashes, which mean line breaks there, become
    spaces. Raises UserError with file and line for anything else."""
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            rows = csv.reader(lines, strict=True)
            for row in rows:
                if not row:
                    continue
                if len(row) != 3:
                    raise _wrong(file, rows.line_num, f"{len(row)} columns, not class, title and description")
                if row[0] not in ("1", "2", "3", "4"):
                    raise _wrong(file, rows.line_num, f"unknown class {printable(repr(row[0]), 60)}, not 1, 2, 3 or 4")
                yield Item(int(row[0]) - 1, row[1].replace("\\", " "), row[2].replace("\\", " "))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Make it readable.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.object[error.start]:#04x}). Save it as UTF-8.") from error
    except csv.Error as error:
        raise _wrong(file, rows.line_num, str(error)) from error


def _wrong(file: Path, line: int, what: str) -> UserError:
    return UserError(f"{file}, line {line}: {what}. Fix that line, or download the file again.")
