"""The record of a run: what every rank writes while it trains, and the summary that rank 0 makes of it."""

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit  # the quantile of t; scipy.stats takes half a second to import

from cos598d.errors import UserError
from cos598d.files import whole_file, write_json
from cos598d.measure.clock import PHASES
from cos598d.measure.ledger import Ledger, Totals
from cos598d.measure.monitor import Monitor
from cos598d.measure.tensorboard import FOLDER, Board
from cos598d.measure.traffic import Traffic, epoch_traffic, wire_summary
from cos598d.measure.wall import WallTime
from cos598d.measure.warm_up import WARM_UP

PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")
# One file of each for every rank.
FILES_BY_RANK = ("iterations.rank{rank}.jsonl", "communication.rank{rank}.jsonl")
# And of these where it has rows for them.
MONITOR_FILES = ("wire.rank{rank}.jsonl", "host.rank{rank}.jsonl")


def claim_folder(folder: Path, overwrite: bool) -> None:
    """Make the output folder. Raises UserError when something stands in it and `overwrite` is off."""
    if folder.is_file():
        raise UserError(f"--output_dir {folder} is a file: give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UserError(f"--output_dir {folder} is not empty: choose another or add --overwrite_output_dir.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be made: {error.strerror}.") from None


class RunRecord:
    """One rank's files in the run's folder: its rows, and rank 0's summary, which comes last: then all is there.

    Use as a context; `ledger` is the ledger to hand to the communicator. Until `publish` the rows lie in files
    without a name in that folder, which vanish with the process however it ends. A `monitor` adds samples taken while
    training goes on, a `board` is shown everything at once.
    """

    def __init__(self, folder: Path, rank: int, monitor: Monitor | None = None, board: Board | None = None):
        self.folder, self.rank = folder, rank
        self._monitor, self._board = monitor, board
        self._traffic = Traffic()
        self._wall = WallTime()
        self._seconds: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.epochs: list[dict[str, Any]] = []

    def __enter__(self) -> "RunRecord":
        self._spools = [
            tempfile.TemporaryFile("w+", encoding="utf-8", dir=self.folder)  # noqa: SIM115 - closed by __exit__
            for _ in (*FILES_BY_RANK, *MONITOR_FILES)
        ]
        self._iterations, communication, wire, host = self._spools
        self.ledger = Ledger(communication)
        if self._monitor:
            self._monitor.open(wire, host, lambda: self.ledger.iteration)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._monitor:
            self._monitor.stop()
        if self._board:
            self._board.close()
        for spool in self._spools:
            spool.close()

    def publish(self) -> None:
        """Write this rank's rows to the run's folder, each file whole."""
        self.ledger.flush()
        for name, spool in zip((*FILES_BY_RANK, *MONITOR_FILES), self._spools, strict=True):
            path = self.folder / name.format(rank=self.rank)
            if name in MONITOR_FILES and not spool.tell():
                path.unlink(missing_ok=True)  # an earlier run's, where rank 0 does not see this host's disk
                continue
            spool.seek(0)
            with whole_file(path) as output:
                shutil.copyfileobj(spool, output)

    def remove_old(self, with_model: bool) -> None:
        """Rank 0: remove what an earlier run left in a folder that is overwritten, its model too where asked."""
        rows = (name.format(rank="*") for name in (*FILES_BY_RANK, *MONITOR_FILES))
        for pattern in ("summary.json", "epochs.jsonl", *PREDICTION_FILES, *rows):
            for old in self.folder.glob(pattern):
                old.unlink()
        if not self._board:
            shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
        if with_model:
            shutil.rmtree(self.folder / "model", ignore_errors=True)

    def begin_training(self) -> None:
        """What travels from now on is training's. Called before every epoch."""
        if self._monitor:
            self._monitor.begin()
        self._wall.begin()

    def pause_training(self) -> None:
        """What travels from now on is not training's. Called after every epoch, when the replicas are equal."""
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
        self._iterations.write(json.dumps(row) + "\n")
        if self._board:
            self._board.iteration(row)
        self._seconds.append(timed)
        self.losses.append(facts["loss"])
        self.ledger.flush()

    def epoch(self, facts: dict[str, Any]) -> None:
        """Add one epoch: its number, iterations, mean loss, metrics and seconds of evaluation. Training's are added."""
        if facts["iterations"]:
            facts = facts | {"training": self._wall.epoch()}
        self.epochs.append(facts)
        if self._board:
            self._board.epoch(facts)

    def share(self) -> dict[str, Any]:
        """What rank 0 needs of this rank for the summary: mean seconds by phase, and mean bytes an iteration.

        Training is over: this ends the sampling.
        """
        if self._monitor:
            self._monitor.stop()
        counted = self._seconds[WARM_UP:] or self._seconds
        iterations = range(len(self._seconds) - len(counted) + 1, len(self._seconds) + 1)
        totals = self.ledger.totals()
        rows = [asdict(totals.get(iteration, Totals())) for iteration in iterations] or [asdict(Totals())]
        return {
            "phases": {phase: _mean([row[f"seconds_{phase}"] for row in counted]) for phase in PHASES},
            **{name: _whole_if_even(statistics.fmean(row[name] for row in rows)) for name in rows[0]},
            "traffic": self._traffic.share(self._monitor and self._monitor.interface),
        }

    def write_summary(self, facts: dict[str, Any], shares: Sequence[dict[str, Any]]) -> None:
        """Rank 0, last of all: write epochs.jsonl and summary.json; `shares` are all ranks', in order of rank."""
        traffic = [share["traffic"] for share in shares]
        for epoch in self.epochs:
            epoch |= epoch_traffic(traffic, epoch["epoch"])
        with whole_file(self.folder / "epochs.jsonl") as output:
            output.writelines(json.dumps(epoch) + "\n" for epoch in self.epochs)
        seconds = [row["seconds"] for row in self._seconds]
        write_json(
            self.folder / "summary.json",
            facts
            | {
                "iterations": len(self.losses),
                "losses": self.losses,
                "epochs": self.epochs,
                "seconds_per_iteration": summarize_seconds(seconds),
                "wall": self._wall.summary(),
                "phases": {f"seconds_{phase}": _mean([share["phases"][phase] for share in shares]) for phase in PHASES},
                "calls_per_iteration": shares[0]["calls"],
                "tensors_per_iteration": shares[0]["tensors"],
                "payload_bytes_per_iteration": shares[0]["payload_bytes"],
                "bytes_sent_per_iteration": [share["bytes_sent"] for share in shares],
                "bytes_received_per_iteration": [share["bytes_received"] for share in shares],
                "wire": wire_summary(traffic),
            },
        )


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
