"""A run's figures for TensorBoard: events in a folder of the record, to watch the run."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError
from cos598d.measure.loggers import Logger
from cos598d.records.conventions import COUNTED, TENSORBOARD

FLUSH_SECONDS = 5  # somebody may be watching
# Fields of the rows that are no chart of their own.
UNSHOWN = frozenset(("iteration", "last_iteration", "epoch", "iterations", "seconds_evaluation"))


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
    """Rank 0's scalars, all by the number of an iteration; an epoch's by its last iteration. An earlier run's events
    are removed first; after a resume, only those of later iterations.

    Written are loss, learning_rate; seconds/iteration and seconds/PHASE; bytes/predicted_sent, bytes/counted_sent and
    the same received (this rank's; see `records.figures.epoch_traffic`). For each evaluation evaluation/METRIC; for
    each epoch also epoch/METRIC, epoch/seconds_training, epoch/examples_per_second and the same of tokens or images.
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
        found = {name: row.get(name) for name in ("loss", "learning_rate")} | {"seconds/iteration": row["seconds"]}
        for name, value in row.items():
            if name.startswith("seconds_"):
                found[f"seconds/{name.removeprefix('seconds_')}"] = value
            elif "_bytes_" in name:
                found[f"bytes/{name.replace('_bytes', '')}"] = value
        self._show(found, row["iteration"])

    def evaluation(self, row: Mapping[str, Any]) -> None:
        metrics = {name: value for name, value in row.items() if name not in UNSHOWN}
        self._show({f"evaluation/{name}": value for name, value in metrics.items() if name != "loss"}, row["iteration"])
        if "last_iteration" not in row:
            return
        training = row.get("training", {})
        rates = {f"{name}_per_second": training.get(f"{name}_per_second_wall") for name in ("examples", *COUNTED)}
        found = metrics | rates | {"seconds_training": training.get("wall_seconds")}
        self._show({f"epoch/{name}": value for name, value in found.items()}, row["iteration"])

    def end(self, row: Mapping[str, Any]) -> None:
        self._writer.close()
