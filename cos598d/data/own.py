"""A task of your own, from a file: `--task_name FILE.py:CLASS`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data.examples import Examples
from cos598d.data.metrics import ACCURACY, CORRELATIONS, Metric
from cos598d.data.task import Row, Scores, TextTask
from cos598d.errors import UsageError, UserError
from cos598d.terminal.own_code import load_class, raised
from cos598d.terminal.printable import printable

MOST_CLASSES = 1000


class OwnTask(TextTask):
    """Texts, or pairs of them, with a class or a number each, from your class:

        class MyTask:
            classes = ("no", "yes")  # the labels; None: labels are numbers

            def examples(self, part, data_dir):
                yield text, label  # or text, second text, label

    `part` is "train", "dev" or "test"; labels of "test" are not read. `data_dir` is the flag's value, or None.
    `examples` must give the same each time. The metrics are the accuracy, or correlations for numbers. Your class may
    define others: `metrics`, a tuple of names, and `score(predictions, labels)`, which returns a dict of them. Both
    arguments are arrays (examples,) of indices into `classes`, or of numbers.
    """

    def __init__(self, named: str):
        """`named` is FILE.py:CLASS. Raises UsageError for a file or a class that cannot be used."""
        own = load_class(named, ("examples",), "task", "Write what is missing")
        self.name, self._named = own.__name__, named
        self._file = str(Path(named.rpartition(":")[0]).resolve())
        try:
            self._own: Any = own()
        except Exception as error:
            raise UsageError(
                f"{named} cannot be constructed: {raised(error, self._file)}. Let its __init__ take no arguments."
            ) from error
        found = getattr(self._own, "classes", ())
        is_list = isinstance(found, (list, tuple)) and all(isinstance(one, str) for one in found)
        if found is not None and not (is_list and 2 <= len(set(found)) == len(found) <= MOST_CLASSES):
            raise UsageError(
                f"{named} has classes = {_shown(found)}. Give a tuple of 2 to {MOST_CLASSES} different names, or None "
                "if labels are numbers."
            )
        self.classes = tuple(found or ())
        self.metric = ACCURACY if self.classes else CORRELATIONS
        if callable(getattr(own, "score", None)):
            names = getattr(self._own, "metrics", ())
            if not isinstance(names, (list, tuple)) or not names or not all(isinstance(one, str) for one in names):
                raise UsageError(
                    f"{named} has score() and metrics = {_shown(names)}. Give a tuple of the names that score() "
                    'returns, such as metrics = ("f1",).'
                )
            self.metric = Metric(tuple(names), self._own.score)

    def find(self, data_dir: str | None) -> str:
        self._data_dir = data_dir
        return self._named + (f" on {data_dir}" if data_dir else "")

    def rows(self, part: str, data_dir: str | None = None) -> Sequence[Row]:
        place = data_dir or self._data_dir
        call = f"{self._named}: examples({part!r}, {place!r})"
        try:
            given = list(self._own.examples(part, place))
        except Exception as error:
            raise UserError(f"{call} {raised(error, self._file)}. Fix that file.") from error
        if not given:
            raise UserError(f"{call} gave no example. Give at least one.")
        return [self._row(call, number, row, has_label=part != "test") for number, row in enumerate(given)]

    def _row(self, call: str, number: int, row: Any, has_label: bool) -> Row:
        is_row = isinstance(row, (list, tuple)) and len(row) in (2, 3)
        if not is_row or not all(isinstance(text, str) for text in row[:-1]):
            raise UserError(
                f"{call}, example {number}, is {_shown(row)}. Give (text, label) or (text, second text, label), where "
                "texts are str."
            )
        if has_label and not (row[-1] in self.classes if self.classes else _is_finite(row[-1])):
            known = f"one of the classes {', '.join(self.classes)}" if self.classes else "a finite number"
            raise UserError(f"{call}: the label of example {number} is {_shown(row[-1])}. Give {printable(known, 100)}.")
        return row[0], row[1] if len(row) == 3 else None, row[-1]

    def score(self, part: str, outputs: np.ndarray, examples: Examples) -> Scores:
        try:
            found = super().score(part, outputs, examples).metrics
        except Exception as error:
            raise UserError(f"{self._named}: score() {raised(error, self._file)}. Fix that file.") from error
        is_right = isinstance(found, Mapping) and set(found) == set(self.metric.names)
        if not is_right or not all(map(_is_finite, found.values())):
            raise UserError(
                f"{self._named}: score() returned {_shown(found)}. Return a dict with a finite number for "
                f"{' and '.join(self.metric.names)}."
            )
        return Scores({name: float(found[name]) for name in self.metric.names})


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return printable(repr(value), 100)
