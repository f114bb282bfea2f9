"""Loggers: five calls by which rank 0 reports its run during training. TensorBoard's is in tensorboard.py."""

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
    """The five calls. Your own logger, `--logger FILE.py:CLASS`, has those that it needs. It may inherit these, which
    do nothing. It is constructed without arguments, on rank 0 only."""

    def run(self, folder: Path, config: Mapping[str, Any], iteration: int) -> None:
        """A run begins in `folder`, or resumes after an `iteration` that is not 0. `config` is that of config.json."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done. `row` is as in `iterations.rank0.jsonl`."""

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """The model was evaluated after `row["iteration"]`. `row` is as in `evaluations.jsonl`; at the end of an epoch
        as in `epochs.jsonl`, with "last_iteration" too."""

    def checkpoint(self, row: Mapping[str, Any]) -> None:
        """A checkpoint was taken after `row["iteration"]`, and is being written to `row["folder"]`."""

    def end(self, row: Mapping[str, Any]) -> None:
        """The run ends after `row["iteration"]`; `row["why"]` is the reason, or None."""


class CsvLogger(Logger):
    """steps.csv and evaluations.csv in the run's folder, written line by line. A resumed run first removes the lines of
    later iterations."""

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
    """A CSV file with the columns of its first row."""

    def __init__(self, path: Path, after: int):
        """Keep the rows of the file up to iteration `after`, or begin the file. Raises OSError."""
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
    """A user's logger; only the calls that it has are made.

    An error in one of them is a UserError with the file's line, since it is not the run's.
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
    """Remove the files of an earlier run's CsvLogger from `folder`. Raises OSError."""
    for name in (CSV_STEPS, CSV_EVALUATIONS):
        (folder / name).unlink(missing_ok=True)


def load_logger(named: str) -> Callable[[], Logger]:
    """The constructor of the logger FILE.py:CLASS.

    Raises UsageError for a file or class that cannot be used. So does the constructor if it fails.
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
            raise UsageError(f"{named} cannot be constructed ({error}). Let its __init__ take no arguments.") from error

    return make


def _rows_up_to(path: Path, iteration: int) -> list[dict[str, Any]]:
    """The complete rows of a file up to this iteration. Damaged ones, by a crash or an editor, are skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as earlier:
            rows = list(csv.DictReader(earlier))
    except (FileNotFoundError, csv.Error):
        return []
    numbers = ((row, row.get("iteration") or "") for row in rows if None not in row and None not in row.values())
    return [row for row, number in numbers if number.isdecimal() and int(number) <= iteration]
