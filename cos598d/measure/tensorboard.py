"""A run's figures for TensorBoard: events in a folder of the record, to watch the run."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError
from cos598d.measure.loggers import Logger
from cos598d.records.conventions import TENSORBOARD

FLUSH_SECONDS = 5  # somebody may be watching
UNSHOWN = frozenset(("iteration", "last_iteration", "epoch", "iterations"))


def check_tensorboard() -> None:
    """Raise UsageError if the package, which the extra `tensorboard` installs, is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs the package tensorboard ({error}). Run `pip install '.[tensorboard]'`, or leave "
            "the flag out."
        ) from None


class Board(Logger):
    """Rank 0's scalars, by the number of an iteration. An earlier run's events are removed first; after a resume, only
    those of later iterations.

    Of each step: loss, learning_rate, examples_per_second, seconds/iteration, seconds/PHASE, and bytes sent and
    received, predicted and counted (this rank's; see `records.figures.epoch_traffic`). Of each evaluation
    evaluation/METRIC.
    """

    def run(self, folder: Path, config: Mapping[str, Any], iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not iteration:
            shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
        purge = iteration + 1 if iteration else None
        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=purge, flush_secs=FLUSH_SECONDS)

    def _show(self, values: Mapping[str, Any], iteration: int) -> None:
        for tag, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(tag, value, iteration)

    def step(self, row: Mapping[str, Any]) -> None:
        found = {"loss": row["loss"], "learning_rate": row.get("learning_rate"), "seconds/iteration": row["seconds"]}
        found["examples_per_second"] = row["examples"] / row["seconds"]
        found |= {name.replace("_", "/", 1): value for name, value in row.items() if name.startswith("seconds_")}
        found |= {f"bytes/{name.replace('_bytes', '')}": value for name, value in row.items() if "_bytes_" in name}
        self._show(found, row["iteration"])

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._show({f"evaluation/{name}": row[name] for name in row.keys() - UNSHOWN}, row["iteration"])

    def end(self, row: Mapping[str, Any]) -> None:
        self._writer.close()
