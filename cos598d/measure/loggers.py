"""Loggers: five calls by which rank 0 reports its run while it trains. TensorBoard's is in tensorboard.py."""

import csv
import inspect
import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import CSV_EVALUATIONS, CSV_STEPS
from cos598d.terminal.files import write_whole
from cos598d.terminal.own_code import load_class, raised

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
        kept = _rows_up_to(path, after) if after else []
        text = io.StringIO()
        self._columns: list[str] = list(kept[0]) if kept else []
        if kept:
            writer = csv.DictWriter(text, self._columns)
            writer.writeheader()
            writer.writerows(kept)
        write_whole(path, text.getvalue())  # a run that is killed here loses no row
        self._file: TextIO = path.open("a", encoding="utf-8", newline="")

    def write(self, row: Mapping[str, Any]) -> None:
        is_first = not self._columns
        self._columns = self._columns or list(row)
        writer = csv.DictWriter(self._file, self._columns, extrasaction="ignore")
        if is_first:
            writer.writeheader()
        writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Own(Logger):
    """A logger of the user's, of which those of the five calls count that it has.

    An error in one of them is a UserError with the file's line: it is no error of the run's.
    """

    def __init__(self, own: Any, named: str):
        self._named, self._file = named, str(Path(named.rpartition(":")[0]).resolve())
        for name in CALLS:
            if callable(getattr(own, name, None)):
                setattr(self, name, partial(self._call, getattr(own, name)))

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:
            why = raised(error, self._file)
            raise UserError(
                f"{self._named}: {method.__name__}() {why}. Fix that file, or leave out --logger."
            ) from error


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
        raise UsageError(f"{named} is not a logger. Give it one or more of the methods {', '.join(CALLS)}.")
    for name in CALLS:
        method, wanted = getattr(kind, name, None), inspect.signature(getattr(Logger, name))
        try:
            if callable(method):
                inspect.signature(method).bind(*wanted.parameters)
        except TypeError as error:
            raise UsageError(f"{named}: {name}() cannot be called ({error}). Write {name}{wanted}.") from None

    def make() -> Logger:
        try:
            return _Own(kind(), named)
        except Exception as error:
            raise UsageError(f"{named} cannot be made ({error}). Let its __init__ take no arguments.") from error

    return make


def _rows_up_to(path: Path, iteration: int) -> list[dict[str, Any]]:
    """The whole rows of a file up to this iteration; what a crash or an editor has damaged is left out."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as earlier:
            rows = list(csv.DictReader(earlier))
    except (FileNotFoundError, csv.Error):
        return []
    numbers = ((row, row.get("iteration") or "") for row in rows if None not in row and None not in row.values())
    return [row for row, number in numbers if number.isdecimal() and int(number) <= iteration]
