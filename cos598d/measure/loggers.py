"""Loggers: five calls by which rank 0 reports its run during training. TensorBoard's is in tensorboard.py."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
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
