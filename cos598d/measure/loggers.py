"""Loggers: five calls by which rank 0 reports its run during training. TensorBoard's is in tensorboard.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError
from cos598d.terminal.own_code import load_class

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


def load_logger(named: str) -> type:
    """The class of the logger FILE.py:CLASS. Raises UsageError for a file or class that cannot be used."""
    kind = load_class(named, (), "logger", "")
    if not any(callable(getattr(kind, name, None)) for name in CALLS):
        raise UsageError(f"{named} is not a logger. Give it one or more of the methods {', '.join(CALLS)}.")
    return kind
