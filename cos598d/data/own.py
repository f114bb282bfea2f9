"""A task of your own, from a file: `--task_name FILE.py:CLASS`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data.examples import Examples
from cos598d.data.metrics import ACCURACY, CORRELATIONS, Metric
from cos598d.data.task import Row, Scores, TextTask
from cos598d.errors import UsageError, UserError
from cos598d.terminal.own_code import load_class, raised
from cos598d.terminal.printable import printable


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
        self.name, self._named, self._file = own.__name__, named, str(Path(named.rpartition(":")[0]).resolve())
        try:
            self._own: Any = own()
            self.classes = tuple(getattr(self._own, "classes", None) or ())
            self.metric = ACCURACY if self.classes else CORRELATIONS
            if hasattr(own, "score"):
                self.metric = Metric(tuple(self._own.metrics), self._own.score)
        except Exception as error:
            why = raised(error, self._file)
            raise UsageError(f"{named} cannot be made: {why}. With score(), it also has metrics, a tuple.") from error
        if len(self.classes) == 1 or not all(isinstance(one, str) for one in self.classes):
            raise UsageError(f"{named} has classes = {_shown(self.classes)}. Give two names or more, or None.")

    def find(self, data_dir: str | None) -> str:
        self._data_dir = data_dir
        return self._named + (f" on {data_dir}" if data_dir else "")

    def rows(self, part: str) -> Sequence[Row]:
        call = f"{self._named}: examples({part!r}, {self._data_dir!r})"
        try:
            given = list(self._own.examples(part, self._data_dir))
        except Exception as error:
            raise UserError(f"{call} {raised(error, self._file)}. Fix that file.") from error
        if not given:
            raise UserError(f"{call} gave no example. Give at least one.")
        for number, row in enumerate(given):
            if (
                not isinstance(row, (list, tuple))
                or len(row) not in (2, 3)
                or not all(isinstance(text, str) for text in row[:-1])
            ):
                form = "(text, label) or (text, second text, label), where texts are str"
                raise UserError(f"{call}, example {number}, is {_shown(row)}. Give {form}.")
            if part != "test" and not (row[-1] in self.classes if self.classes else _is_finite(row[-1])):
                known = ", ".join(self.classes) or "a finite number"
                raise UserError(f"{call}: the label of example {number} is {_shown(row[-1])}. Give {known}.")
        return [(row[0], row[1] if len(row) == 3 else None, row[-1]) for row in given]

    def score(self, part: str, outputs: np.ndarray, examples: Examples) -> Scores:
        try:
            found = {name: float(value) for name, value in super().score(part, outputs, examples).metrics.items()}
        except Exception as error:
            raise UserError(f"{self._named}: score() {raised(error, self._file)}. Fix that file.") from error
        if set(found) != set(self.metric.names) or not all(map(math.isfinite, found.values())):
            wanted = " and ".join(self.metric.names)
            raise UserError(f"{self._named}: score() returned {_shown(found)}. Return a finite number for {wanted}.")
        return Scores(found)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and math.isfinite(value)


def _shown(value: Any) -> str:
    return printable(repr(value), 100)
