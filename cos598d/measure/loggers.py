"""Loggers: what a run tells somebody who looks on, by five calls of rank 0. TensorBoard's is in tensorboard.py."""

import csv
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from cos598d.errors import UsageError
from cos598d.own_code import load_class
from cos598d.records.conventions import CSV_EVALUATIONS, CSV_STEPS

CALLS = ("run", "step", "evaluation", "checkpoint", "end")


class Logger:
    """The five calls. A logger of your own has those that it needs, under `--logger FILE.py:CLASS`, and may inherit
    these, which do nothing. It is made without arguments, on rank 0 only."""

    def run(self, folder: Path, config: Mapping[str, Any], iteration: int) -> None:
        """A run begins in `folder`, or goes on after an `iteration` that is not 0; `config` is as in config.json."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done: `row` is as in `iterations.rank0.jsonl`."""

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """The model was evaluated after `row["iteration"]`: a row of `evaluations.jsonl`. At the end of an epoch, that
        of `epochs.jsonl`, which has "last_iteration" too."""

    def checkpoint(self, row: Mapping[str, Any]) -> None:
        """A checkpoint was taken after `row["iteration"]`; `row["folder"]` is where it is written meanwhile."""

    def end(self, row: Mapping[str, Any]) -> None:
        """The run ends after `row["iteration"]`; `row["why"]` is None, or says what it ended for."""


class CsvLogger(Logger):
    """steps.csv and evaluations.csv in the run's folder, a line as soon as there is one. Where a run goes on, the lines
    of later iterations go first."""

    def run(self, folder: Path, config: Mapping[str, Any], iteration: int) -> None:
        self._files = [_Table(folder / name, iteration) for name in (CSV_STEPS, CSV_EVALUATIONS)]

    def step(self, row: Mapping[str, Any]) -> None:
        self._files[0].write({name: value for name, value in row.items() if not isinstance(value, (dict, list))})

    def evaluation(self, row: Mapping[str, Any]) -> None:
        found = {name: value for name, value in row.items() if isinstance(value, float) and name != "loss"}
        self._files[1].write({"iteration": row["iteration"], "epoch": row["epoch"]} | found)

    def end(self, row: Mapping[str, Any]) -> None:
        for file in self._files:
            file.close()


class _Table:
    """A CSV file, whose columns are those of its first row."""

    def __init__(self, path: Path, after: int):
        """Keep the rows of the file up to the iteration `after`, or begin it. Raises OSError."""
        kept: Sequence[dict[str, Any]] = ()
        if after and path.is_file():
            with path.open(encoding="utf-8", newline="") as earlier:
                kept = [row for row in csv.DictReader(earlier) if _number(row.get("iteration")) <= after]
        self._file: TextIO = path.open("w", encoding="utf-8", newline="")
        self._writer: csv.DictWriter[str] | None = None
        for row in kept:
            self.write(row)

    def write(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row), extrasaction="ignore")
            self._writer.writeheader()
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Own(Logger):
    """A logger of the user's, of which those of the five calls count that it has."""

    def __init__(self, own: Any):
        for name in CALLS:
            if callable(getattr(own, name, None)):
                setattr(self, name, getattr(own, name))


def remove_tables(folder: Path) -> None:
    """Remove what an earlier run's CsvLogger left in `folder`. Raises OSError."""
    for name in (CSV_STEPS, CSV_EVALUATIONS):
        (folder / name).unlink(missing_ok=True)


def load_logger(named: str) -> Callable[[], Logger]:
    """What makes the logger that FILE.py:CLASS names, and raises UsageError if that is not possible.

    Raises UsageError in a sentence for a file or class that cannot be used.
    """
    kind = load_class(named, (), "logger", "")
    if not any(callable(getattr(kind, name, None)) for name in CALLS):
        raise UsageError(f"{named} is no logger: give it one or more of the methods {', '.join(CALLS)}.")
    for name in CALLS:
        method, wanted = getattr(kind, name, None), inspect.signature(getattr(Logger, name))
        try:
            if callable(method):
                inspect.signature(method).bind(*wanted.parameters)
        except TypeError as error:
            raise UsageError(f"{named}: {name}() cannot be called ({error}): write {name}{wanted}.") from None

    def make() -> Logger:
        try:
            return _Own(kind())
        except Exception as error:
            raise UsageError(f"{named} cannot be made ({error}). Let its __init__ take no arguments.") from error

    return make


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
