"""A run as the report reads it: its summary, its flags and its machine. Its rows are data frames."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from cos598d.errors import UserError
from cos598d.records.conventions import (
    COMMUNICATION,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    FLOOR,
    HOST,
    ITERATIONS,
    SUMMARY,
    WARM_UP,
)
from cos598d.records.schema import Classes, Count, Environment, Epoch, Iteration, Sample, Summary, read, read_rows
from cos598d.records.unfinished import read_summary
from cos598d.terminal.printable import printable
from cos598d.tools.report.busy import busy_and_own, share_of_others
from cos598d.tools.report.cells import exact

if TYPE_CHECKING:
    import pandas as pd

# Flags in how gradients travel, in which runs that are compared may differ.
HOW = frozenset(
    ("sync", "bucket_mb", "compress", "sync_every", "fragments", "outer_learning_rate", "outer_momentum")
    + ("reshard", "zero_stage", "check_replicas")
)
# Flags that change no iteration, and those of which the summary or the environment tells what came of them.
PLACES = frozenset(
    ("output_dir", "overwrite_output_dir", "overwrite_cache", "cache_dir", "data_dir", "save_model", "label", "logger")
    + ("resume", "resume_anyway", "keep", "save_steps", "save_epochs", "save_seconds", "max_seconds", "timeout")
    + ("log_every", "monitor_interval", "tensorboard", "do_train", "do_eval", "do_predict", "eval_steps")
    + ("max_eval_examples", "per_gpu_eval_batch_size", "per_gpu_train_batch_size", "threads", "backend", "no_cuda")
)
COLUMNS = ["iteration", "loss", "seconds", "learning_rate"]


class Call(msgspec.Struct):
    """What is read of a row of the communication log."""

    tensor: str
    op: str
    purpose: str
    payload_bytes: Count
    bytes_sent: Count
    bytes_received: Count
    seconds: float | None = None
    started: float | None = None


@dataclass(frozen=True)
class Run:
    """A run's record. `loads`: by rank, the share of its machine's processors that was busy, and how many it used."""

    name: str
    folder: Path
    summary: Summary
    config: dict[str, Any]
    environment: Environment
    loads: list[tuple[float, float] | None]

    @property
    def busy(self) -> float | None:
        """The share of the processors that other programs took; see `share_of_others`."""
        return share_of_others(self.loads, self.environment)

    @property
    def mean(self) -> float | None:
        """The mean seconds of an iteration after the warm-up."""
        return self.summary.seconds_per_iteration.mean

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the run's losses and seconds, except how its gradients travel. What is not known is not there.

        One rank has no network, and threads of its own: it can be compared with any number of ranks.
        """
        summary, ground = self.summary, self.environment
        found = {name: value for name, value in self.config.items() if name not in PLACES | HOW}
        names = ("model", "data", "precision", "dropout", "seed", "max_seq_length", "total_train_batch_size")
        found |= {name: getattr(summary, name) for name in names}
        known = {name: getattr(ground, name) for name in ("processor", "cores", "device", "tf32", "commit")}
        known["torch"] = ground.versions.get("torch")
        if summary.epochs and not summary.epochs[0].get("is_cut"):
            known["examples per epoch"] = summary.epochs[0].get("training", {}).get("examples")
        found.pop("world_size", None)
        if summary.world_size > 1:
            known |= {"ranks": summary.world_size, "threads_per_rank": ground.threads_per_rank}
            found |= {name: getattr(ground.network, name, None) for name in ("rate", "delay")}
        return found | {name: value for name, value in known.items() if value is not None}

    @property
    def drifts(self) -> bool:
        """Whether its ranks do not average in every step, so that they compute something else."""
        is_rare = (self.config.get("sync_every") or 1) > 1
        return self.summary.world_size > 1 and (self.summary.sync == FLOOR or is_rare)

    @property
    def is_in_ledger(self) -> bool:
        """Whether the communication log has all bytes; if not, a library sends some that only the kernel knows of."""
        return self.summary.bytes_from == "ledger"

    def iterations(self) -> "pd.DataFrame":
        """Rank 0's rows, with COLUMNS. Raises UserError for a damaged one."""
        import pandas as pd

        return pd.DataFrame.from_records(map(attrgetter(*COLUMNS), self._rows()), columns=COLUMNS)

    def typical(self) -> Iteration | None:
        """Rank 0's row nearest to the median of the seconds, of those that have their phases' parts, and their calls.

        Without the warm-up if there are others; None without any."""
        told = [row for row in self._rows() if row.spans_seconds]
        told = told[WARM_UP:] or told
        middle = median(row.seconds for row in told) if told else 0.0
        return min(told, key=lambda row: abs(row.seconds - middle), default=None)

    def calls(self, iteration: int, rank: int = 0) -> list[dict[str, Any]]:
        """A rank's calls in one iteration, as far as the log has them. It has up to millions of rows: only those of the
        iteration are decoded."""
        path, begin = self.folder / COMMUNICATION.format(rank=rank), f'{{"iteration": {iteration},'.encode()
        if not path.exists():
            return []
        with path.open("rb") as file:
            lines = [line for line in file if line.startswith(begin)]
        try:
            return [msgspec.to_builtins(msgspec.json.decode(line, type=Call)) for line in lines if line[-1:] == b"\n"]
        except msgspec.DecodeError as error:
            raise UserError(f"{path} is damaged: {error}. Run it again.") from None

    def _rows(self) -> Iterator[Iteration]:
        return read_rows(self.folder / ITERATIONS.format(rank=0), Iteration)


def load_run(folder: Path, name: str = "") -> Run:
    """The run in a folder, finished or not. Raises UserError, in one sentence, if there is none that can be read."""
    summary = read_summary(folder, unfinished=True)
    if {len(summary.bytes_sent_per_iteration), len(summary.bytes_received_per_iteration)} != {summary.world_size}:
        raise UserError(
            f"{folder / SUMMARY} is damaged: its lists are not of {summary.world_size} ranks. Run it again."
        )
    try:
        msgspec.convert(summary.epochs, list[Epoch])
    except msgspec.ValidationError as error:
        raise UserError(f"{folder / SUMMARY} is damaged: epochs: {error}. Run it again.") from None
    config, environment = read(folder / CONFIG_FILE, dict), read(folder / ENVIRONMENT_FILE, Environment)
    samples = (read_rows(folder / HOST.format(rank=rank), Sample) for rank in range(summary.world_size))
    loads = [busy_and_own(rows) for rows in samples]
    return Run(name or printable(folder.resolve().name), folder, summary, config, environment, loads)


def own_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of the folders above as tell them apart; a folder given twice is an error."""
    folders = [folder.resolve() for folder in folders]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise UserError(f"{folder} is given twice. Give each folder once.")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return [printable("/".join(folder.parts[-depth:])) for folder in folders]


def differing(runs: Sequence[Run]) -> dict[str, dict[str, list[str]]]:
    """The settings in which runs differ: by name, and then by the value in words, which runs have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, value in run.settings.items():
            found.setdefault(name, {}).setdefault(exact(value), []).append(run.name)
    return {name: values for name, values in found.items() if len(values) > 1}


def last_classes(run: Run) -> Classes | None:
    """The classes of the last epoch that has any."""
    found = (epoch for epoch in reversed(run.summary.epochs) if epoch.get("by_class"))
    return next((msgspec.convert(epoch, Classes) for epoch in found), None)
