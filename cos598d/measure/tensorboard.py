"""A run's figures for TensorBoard: events in a folder of the record, to watch the run.

Unlike the record's other files, they appear during the run, and stay if the run fails.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError
from cos598d.measure.loggers import Logger
from cos598d.records.conventions import COUNTED, TENSORBOARD
from cos598d.terminal.files import remove_known

FLUSH_SECONDS = 5  # somebody may be watching
LOSSES = ("loss", "evaluation/validation_loss")


def check_tensorboard() -> None:
    """Raise UsageError if the package, which the extra `tensorboard` installs, is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs the package tensorboard ({error}). Run `pip install '.[tensorboard]'`, or leave "
            "the flag out."
        ) from None


def remove_events(record: Path) -> None:
    """Remove an earlier run's events from the run's folder `record`. Raises OSError."""
    remove_known(record / TENSORBOARD, ("events.out.tfevents.*",))


class Board(Logger):
    """Rank 0's scalars, all by the number of an iteration; an epoch's by its last iteration. An earlier run's events
    are removed first; after a resume, only those of later iterations.

    Written are loss, learning_rate; seconds/iteration and seconds/PHASE; bytes/predicted_sent, bytes/counted_sent and
    the same received (this rank's; see `records.figures.epoch_traffic`). For each epoch: epoch/loss, epoch/METRIC,
    epoch/seconds_training, epoch/examples_per_second and the same of tokens or images. For every evaluation, an epoch's
    too: evaluation/METRIC, by its iteration, and for few classes class/METRIC/NAME. LOSSES share a chart.
    """

    def run(self, folder: Path, config: Mapping[str, Any], iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not iteration:
            remove_events(folder)
        purge = iteration + 1 if iteration else None
        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=purge, flush_secs=FLUSH_SECONDS)
        # In one chart, under "Custom scalars".
        self._writer.add_custom_scalars({"loss": {"training and validation": ["Multiline", list(LOSSES)]}})

    def step(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name in ("loss", "learning_rate"):
                tag = name
            elif name == "seconds":
                tag = "seconds/iteration"
            elif name.startswith("seconds_"):
                tag = f"seconds/{name.removeprefix('seconds_')}"
            elif "_bytes_" in name:
                tag = f"bytes/{name.replace('_bytes', '')}"
            else:
                continue
            if value is not None:
                self._writer.add_scalar(tag, value, row["iteration"])

    def _epoch(self, facts: Mapping[str, Any]) -> None:
        """Show an epoch's mean loss, metrics, seconds of evaluation and speed of training."""
        for name, value in facts.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"epoch/{name}", value, facts["last_iteration"])
        training = facts.get("training", {})
        found = {f"{name}_per_second": training.get(f"{name}_per_second_wall") for name in ("examples", *COUNTED)}
        for name, value in (found | {"seconds_training": training.get("wall_seconds")}).items():
            if value is not None:
                self._writer.add_scalar(f"epoch/{name}", value, facts["last_iteration"])

    def evaluation(self, row: Mapping[str, Any]) -> None:
        if "last_iteration" in row:
            self._epoch(row)
        for name, value in row.items():
            if isinstance(value, float) and name not in ("loss", "seconds_evaluation"):
                self._writer.add_scalar(f"evaluation/{name}", value, row["iteration"])
        for one in row.get("by_class", []) if "confusion" in row else []:
            for name in ("precision", "recall", "f1"):
                self._writer.add_scalar(f"class/{name}/{one['class']}", one[name], row["iteration"])

    def end(self, row: Mapping[str, Any]) -> None:
        self._writer.close()
