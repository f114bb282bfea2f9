"""The record of a run: what every rank writes while it trains, and the summary that rank 0 makes of it."""

import contextlib
import json
import shutil
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit  # the quantile of t; scipy.stats takes half a second to import

from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.files import GrowingFile, json_text
from cos598d.measure.host import peak_gpu_bytes, peak_memory_bytes
from cos598d.measure.monitor import Monitor
from cos598d.measure.tensorboard import FOLDER, Board
from cos598d.measure.totals import Traffic, epoch_traffic, wire_summary
from cos598d.measure.wall import WallTime
from cos598d.records.conventions import PHASES, WARM_UP

PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")
# One file of each for every rank.
FILES_BY_RANK = ("iterations.rank{rank}.jsonl", "communication.rank{rank}.jsonl")
# And of these where it has rows for them.
MONITOR_FILES = ("wire.rank{rank}.jsonl", "host.rank{rank}.jsonl")

# What stands in the folder when a file cannot be written: before `remove_old`, and after it.
OLD_STANDS = "this run has left nothing in {folder}, and an earlier run's files are still there."
OLD_IS_GONE = "the record in {folder} is incomplete, and the earlier run's is already gone."


class RunRecord:
    """One rank's files in the run's folder: its rows, and rank 0's summary, which comes last: then all is there.

    Use as a context; `ledger` is the ledger to hand to the communicator. Until `publish` the rows lie in files
    without a name in that folder, which vanish with the process however it ends. A `monitor` adds samples taken while
    training goes on, a `board` is shown everything at once. In memory an iteration leaves some hundred bytes: seconds,
    their phases and the loss, and the ledger's sums.

    A file that does not fit on the disk is a UserError that names it, and says what is safe.
    """

    def __init__(self, folder: Path, rank: int, monitor: Monitor | None = None, board: Board | None = None):
        self.folder, self.rank = folder, rank
        self._monitor, self._board = monitor, board
        self._traffic = Traffic()
        self._wall = WallTime()
        self._seconds = {name: array("d") for name in ("seconds", *(f"seconds_{phase}" for phase in PHASES))}
        self._losses = array("d")
        self._is_training = False
        self.epochs: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []  # those within an epoch
        self.memory: dict[
            str, dict[str, int]
        ] = {}  # bytes of this rank by category: "between_steps", "peak", "formula"

    def __enter__(self) -> "RunRecord":
        self._files: list[GrowingFile] = []
        self._staged: list[GrowingFile] = []
        with self._on_disk():
            for name in (*FILES_BY_RANK, *MONITOR_FILES):
                self._files.append(GrowingFile(self.folder / name.format(rank=self.rank)))
        self._iterations, communication, wire, host = self._files
        self.ledger = Ledger(communication)
        if self._monitor:
            self._monitor.open(wire, host, lambda: self.ledger.iteration)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._monitor:
            self._monitor.stop()
        if self._board:
            self._board.close()
        for file in (*self._files, *self._staged):
            file.close()

    def remove_old(self, with_model: bool) -> None:
        """Rank 0: remove what an earlier run left in a folder that is overwritten, its model too where asked.

        Called when all that comes in its place is whole on the disk of every rank.
        """
        rows = (name.format(rank="*") for name in (*FILES_BY_RANK, *MONITOR_FILES))
        for pattern in ("summary.json", "epochs.jsonl", *PREDICTION_FILES, *rows):
            for old in self.folder.glob(pattern):
                old.unlink()
        if not self._board:
            shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
        if with_model:
            shutil.rmtree(self.folder / "model", ignore_errors=True)

    @property
    def losses(self) -> list[float]:
        """The global batch's loss in every iteration so far."""
        return list(self._losses)

    def complete(self) -> None:
        """Bring this rank's rows whole to the disk. After this, when it went well on every rank, `publish` has room."""
        with self._on_disk():
            self.ledger.flush()
            for file in self._files:
                file.complete()

    def publish(self) -> None:
        """Give this rank's rows their names in the run's folder, in place of an earlier run's."""
        with self._on_disk(OLD_IS_GONE):
            self.ledger.flush()
            for name, file in zip((*FILES_BY_RANK, *MONITOR_FILES), self._files, strict=True):
                if name in MONITOR_FILES and file.is_empty:
                    file.path.unlink(missing_ok=True)
                else:
                    file.publish()

    @contextlib.contextmanager
    def _on_disk(self, remains: str = OLD_STANDS) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{error.filename} cannot be written ({error.strerror}): make room there or choose another "
                f"--output_dir; {remains.format(folder=self.folder)}"
            ) from None

    def begin_training(self) -> None:
        """What travels from now on is training's. Called before every iteration: it does something after a pause."""
        if self._is_training:
            return
        self._is_training = True
        if self._monitor:
            self._monitor.begin()
        self._wall.begin()

    def pause_training(self) -> None:
        """What travels from now on is not training's. Called before every evaluation, when the replicas are equal."""
        self._is_training = False
        counted = self._monitor.pause() if self._monitor else None
        self._traffic.add_to_last(self.ledger.moved(self.ledger.iteration), counted)
        self._wall.end()

    def iteration(self, facts: dict[str, Any], seconds: float, phases: dict[str, float]) -> None:
        """Add one iteration. Called off its clock, so that recording is not what is measured; `wall_seconds` has it."""
        wall = {"wall_seconds": self._wall.lap(seconds, facts["examples"])}
        timed = {"seconds": seconds, **{f"seconds_{phase}": phases[phase] for phase in PHASES}}
        iteration = facts["iteration"]
        counted = self._monitor.end_iteration(iteration) if self._monitor else None
        row = facts | timed | wall | self._traffic.add(facts["epoch"], self.ledger.moved(iteration), counted)
        for name, value in timed.items():
            self._seconds[name].append(value)
        self._losses.append(facts["loss"])
        if self._board:
            self._board.iteration(row)
        with self._on_disk():
            self._iterations.write(json.dumps(row) + "\n")
            self.ledger.flush()

    def epoch(self, facts: dict[str, Any]) -> None:
        """Add one epoch: its number, iterations, mean loss, metrics and seconds of evaluation. Training's are added."""
        if facts["iterations"]:
            facts = facts | {"training": self._wall.epoch()}
        self.epochs.append(facts)
        if self._board:
            self._board.epoch(facts)

    def evaluation(self, facts: dict[str, Any]) -> None:
        """Add an evaluation within an epoch: after which iteration, in which epoch, its metrics and its seconds."""
        self.evaluations.append(facts)

    def share(self) -> dict[str, Any]:
        """What rank 0 needs of this rank for the summary: mean seconds by phase, and mean bytes an iteration.

        Training is over: this ends the sampling.
        """
        if self._monitor:
            self._monitor.stop()
        count = len(self._losses)
        left_out = WARM_UP if count > WARM_UP else 0
        totals = self.ledger.mean_totals(left_out + 1, count)
        return {
            "phases": {phase: _mean(self._seconds[f"seconds_{phase}"][left_out:]) for phase in PHASES},
            **{name: _whole_if_even(mean) for name, mean in totals.items()},
            "traffic": self._traffic.share(self._monitor.interface if self._monitor else None),
            "memory": {"process_peak_bytes": peak_memory_bytes(), "gpu_peak_bytes": peak_gpu_bytes(), **self.memory},
        }

    def stage(self, facts: dict[str, Any], shares: Sequence[dict[str, Any]], others: Mapping[str, Any]) -> None:
        """Rank 0: write summary.json, epochs.jsonl and `others` (JSON values by their files' names), all yet unnamed.

        `shares` are all ranks', in order of rank. NaN and infinities are refused (ValueError).
        """
        traffic = [share["traffic"] for share in shares]
        for epoch in self.epochs:
            epoch |= epoch_traffic(traffic, epoch["epoch"])
        texts = {name: json_text(value) for name, value in others.items()}
        texts["epochs.jsonl"] = "".join(json.dumps(epoch) + "\n" for epoch in self.epochs)
        texts["summary.json"] = json_text(facts | self._figures(shares, traffic))
        with self._on_disk():
            for name, text in texts.items():
                self._staged.append(GrowingFile(self.folder / name))
                self._staged[-1].write(text)
                self._staged[-1].complete()

    def publish_summary(self) -> None:
        """Rank 0, when all rows have their names: give what is staged its own, the summary last."""
        with self._on_disk(OLD_IS_GONE):
            for file in self._staged:
                file.publish()

    def _figures(self, shares: Sequence[dict[str, Any]], traffic: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "iterations": len(self._losses),
            "losses": self.losses,
            "epochs": self.epochs,
            **({"evaluations": self.evaluations} if self.evaluations else {}),
            "seconds_per_iteration": summarize_seconds(self._seconds["seconds"]),
            "wall": self._wall.summary(),
            "phases": {f"seconds_{phase}": _mean([share["phases"][phase] for share in shares]) for phase in PHASES},
            "calls_per_iteration": shares[0]["calls"],
            "tensors_per_iteration": shares[0]["tensors"],
            "payload_bytes_per_iteration": shares[0]["payload_bytes"],
            "bytes_sent_per_iteration": [share["bytes_sent"] for share in shares],
            "bytes_received_per_iteration": [share["bytes_received"] for share in shares],
            "wire": wire_summary(traffic),
            "memory": {name: [share["memory"][name] for share in shares] for name in shares[0]["memory"]},
        }


def summarize_seconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Mean, median, 90th percentile and the mean's 95 % interval (Student's t) of the iterations after WARM_UP.

    The interval is of this run's iterations: another run of the same settings may lie outside it. The first iteration
    is given beside them. Where there are too few iterations for a figure it is None.
    """
    counted = list(seconds[WARM_UP:])
    summary: dict[str, Any] = {
        "first": seconds[0] if seconds else None,
        "counted": len(counted),
        "mean": None,
        "median": None,
        "p90": None,
        "interval_95": None,
    }
    if counted:
        summary |= {
            "mean": statistics.fmean(counted),
            "median": statistics.median(counted),
            "p90": float(np.quantile(counted, 0.9)),
        }
    if len(counted) > 1:
        margin = float(stdtrit(len(counted) - 1, 0.975)) * statistics.stdev(counted) / len(counted) ** 0.5
        summary["interval_95"] = [summary["mean"] - margin, summary["mean"] + margin]
    return summary


def _whole_if_even(value: float) -> float | int:
    """Most syncs do the same in every iteration: then the mean is a count, and shown as one."""
    return int(value) if value == int(value) else value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
