"""The record of a run: rows that each rank appends while it trains, and rank 0's summary, which is written last.

A folder with a summary.json has a run that ended well. Without one it has a run that is at work, or was stopped.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from cos598d.comm.ledger import Ledger
from cos598d.errors import one_line
from cos598d.measure.claim import PREDICTION_FILES
from cos598d.measure.monitor import Monitor, peak_gpu_bytes, peak_memory_bytes
from cos598d.measure.peak import share_of_peak
from cos598d.measure.rows import RowFile, cut_after, logs_calls
from cos598d.measure.sent import Sent
from cos598d.measure.tensorboard import Board
from cos598d.records import figures
from cos598d.records.conventions import (
    ATTEMPTS,
    COMMUNICATION,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EPOCHS,
    EVALUATIONS,
    FINISHED,
    HOST,
    ITERATIONS,
    PHASES,
    SETTING,
    SUMMARY,
)
from cos598d.records.schema import AttemptRow, Iteration, Sample, read_rows
from cos598d.terminal.files import write_json, write_whole

if TYPE_CHECKING:
    from cos598d.comm.group import Ranks

OF_RANKS = (ITERATIONS, COMMUNICATION, HOST)
OF_RUN = (EPOCHS, EVALUATIONS, ATTEMPTS)  # rank 0's
Row = dict[str, Any]


class RunRecord:
    """One rank's part of a run's record, a context. Its `ledger` is the one that listens during training.

    1. A row is appended to a file, and handed to the system at once: it can be read, and survives the process.
    2. A row of iterations is written when the next one begins, or before a checkpoint is complete, since bytes that are
       sent between two belong to the first. Calls have rows in the first iterations, and then rarely (`rows`).
    3. `resume_at` is the iteration of the checkpoint that a run resumes from: rows up to there are kept, and later ones
       cut off. Without it an earlier run's rows are removed.
    4. `finish` adds up the rows. A file that is complete has nothing else to be right about.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        monitor: Monitor | None = None,
        board: Board | None = None,
        *,
        world_size: int = 1,
        resume_at: int | None = None,
    ):
        self.folder, self.rank, self.world_size, self.iterations = folder, rank, world_size, resume_at or 0
        self.epochs: list[Row] = []
        self.evaluations: list[Row] = []  # those inside an epoch
        self.memory: Row = {}  # of this rank, by category
        self._monitor, self._board = monitor, board
        self._is_resumed, self._is_finished, self._is_training = resume_at is not None, False, False
        self._last: Iteration | None = None  # not written yet
        self._moment: float | None = None  # end of the wall time in the rows so far; None while training pauses
        self._why = ""

    def __enter__(self) -> "RunRecord":
        self.folder.mkdir(parents=True, exist_ok=True)
        lost = self._take_up()
        names = [name.format(rank=self.rank) for name in OF_RANKS] + list(OF_RUN if self.rank == 0 else ())
        self._files = {name: RowFile(self.folder / name) for name in names}
        self._rows, calls, host = (self._files[name] for name in names[:3])
        self.ledger = Ledger(calls, logs_calls)
        self.ledger.iteration = self.iterations
        self._sent = Sent(self.ledger, self._monitor.read if self._monitor else lambda: None)
        if self._monitor:
            earlier = list(read_rows(host.path, Sample))
            self._monitor.open(host.add, lambda: self.ledger.iteration, earlier[-1] if earlier else None)
        if self.rank == 0:
            begun = AttemptRow(self.iterations, begun=_utc(), ranks=self.world_size, lost_iterations=lost)
            self._files[ATTEMPTS].add(begun)
        return self

    def _take_up(self) -> int:
        """Keep an earlier attempt's rows up to where this one starts; return how many iterations are lost by that."""
        names, lost = [name.format(rank=self.rank) for name in OF_RANKS], 0
        if self.rank == 0:
            departed = {rank for rank in map(_rank_of, _rows_in(self.folder)) if rank >= self.world_size}
            names += [*OF_RUN, *(name.format(rank=rank) for name in OF_RANKS for rank in departed)]
            for name in (SUMMARY, *PREDICTION_FILES):
                (self.folder / name).unlink(missing_ok=True)
        for path in (self.folder / name for name in names):
            if not self._is_resumed:
                path.unlink(missing_ok=True)
            if path.exists() and path.name != ATTEMPTS:
                lost = max(lost, cut_after(path, self.iterations))
        if self.rank == 0:
            self.epochs = list(read_rows(self.folder / EPOCHS, dict))
            self.evaluations = list(read_rows(self.folder / EVALUATIONS, dict))
        return lost

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._monitor:
            self._monitor.stop()
        why = self._why or (one_line(error) if error else "ended before its work was done")
        with contextlib.suppress(OSError):  # a full disk is not what ended the run
            self.write_last()
            if not self._is_finished:
                self._end(why)
        for file in self._files.values():
            file.close()
        if not self._is_finished and not self.iterations and not self.epochs:  # nothing that is worth a look
            for name in (*self._files, *((SETTING, CONFIG_FILE, ENVIRONMENT_FILE) if self.rank == 0 else ())):
                (self.folder / name).unlink(missing_ok=True)
        if self._board:
            self._board.close()

    def describe(self, files: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        """On rank 0: write `files` (JSON values by name) and the summary's facts, for readers during the run."""
        for name, value in {**files, SETTING: setting}.items():
            write_json(self.folder / name, value)
        if self._board:
            self._board.open(self.folder, self.iterations)

    def ends(self, why: str) -> None:
        """Set why this attempt is about to end before its work is done."""
        self._why = why

    def _end(self, why: str) -> None:
        if self.rank == 0:
            self._files[ATTEMPTS].add(AttemptRow(self.iterations, ended=_utc(), why=" ".join(why.split())))

    def begin_training(self) -> None:
        """Count what is sent from now on as training's. Called before a sync settles."""
        self._sent.take(self._is_training)
        if not self._is_training and self._monitor:
            self._monitor.begin()
        self._is_training = True
        self.begin_saving()

    def begin_iteration(self) -> None:
        """Write the row of the iteration before, and count what is sent from now on for the next one."""
        self.write_last()
        self.begin_training()

    def begin_saving(self) -> None:
        """Run the wall time from here: the copy for a checkpoint counts for the next iteration's seconds."""
        self._moment = self._moment or time.perf_counter()

    def pause_training(self) -> None:
        """Do not count what is sent from now on. Called before every evaluation, when the replicas are equal."""
        if not self._is_training:
            return
        self._sent.take(is_training=True, always=True)
        if self._monitor:
            self._monitor.pause()
        if self._last and self._moment is not None:
            self._last.wall_seconds_after = round(time.perf_counter() - self._moment, 9)
        self._moment, self._is_training = None, False

    def iteration(
        self, facts: Row, seconds: float, phases: Mapping[str, float], counts: Mapping[str, int] | None = None
    ) -> None:
        """Add one iteration. Call it outside of its clock, so that recording is not measured, except in `wall_seconds`.

        `facts` are fields of its row, `counts` its examples' tokens or images.
        """
        self._sent.take(is_training=True, always=True)
        self.iterations, now = facts["iteration"], time.perf_counter()
        timed = {"seconds": seconds, "wall_seconds": now - (self._moment or now)}
        timed |= {f"seconds_{phase}": phases[phase] for phase in PHASES}
        row = facts | {name: round(value, 9) for name, value in timed.items()} | {"wall_seconds_after": 0.0}
        spans = [(name, round(begin, 9), round(length, 9)) for name, begin, length in facts.get("spans_seconds", ())]
        row |= {"spans_seconds": spans if logs_calls(self.iterations) else []}
        self._moment = now
        self._last = Iteration(**row | dict(counts or {}) | self._sent.fields())
        if self._board:
            self._board.step(msgspec.to_builtins(self._last))

    def write_last(self) -> None:
        """Write the row of the last iteration, with what was sent since it."""
        self._sent.take(self._is_training)
        if self._last:
            self._rows.add(msgspec.structs.replace(self._last, **self._sent.fields()))
            self._last = None
            self._sent.clear()

    def epoch(self, facts: Row) -> None:
        """Add one epoch: its number, metrics and seconds of evaluation. What its iterations' rows tell is added."""
        done = self.epochs[-1]["last_iteration"] if self.epochs else 0
        written = (row for row in read_rows(self._rows.path, Iteration) if row.iteration > done)
        row = figures.epoch_training([*written, *([self._last] if self._last else [])])
        row = row | facts | {"last_iteration": self.iterations}
        self.epochs.append(row)
        self._show(EPOCHS, row)

    def evaluation(self, facts: Row) -> None:
        """Add an evaluation inside an epoch: its iteration, epoch, metrics and seconds."""
        self.evaluations.append(facts)
        self._show(EVALUATIONS, facts)

    def _show(self, name: str, row: Row) -> None:
        if self.rank == 0:
            self._files[name].add(row)
        if self._board:
            self._board.evaluation({"iteration": self.iterations} | row)

    def finish(self, comm: "Ranks", setting: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        """The work is done: rank 0 writes `files` (by name, JSON or text) and the summary. Every rank calls it."""
        self.write_last()
        if self._monitor:
            self._monitor.stop()
        mine = figures.rank_figures(read_rows(self._rows.path, Iteration))
        figures.added(mine["by_purpose"], self._sent.by_purpose)  # of a last checkpoint, which is in no row
        memory = {"process_peak_bytes": peak_memory_bytes(), "gpu_peak_bytes": peak_gpu_bytes(), **self.memory}
        shares = comm.collect([mine, memory])
        self._end(self._why or FINISHED)
        self._is_finished = shares is None
        if shares is None:
            return
        ranks, memories = zip(*shares, strict=True)
        places = {_rank_of(place): place for place in _rows_in(self.folder)}
        departed = [places[rank] for rank in sorted(places) if rank >= self.world_size]
        known = [*ranks, *(figures.rank_figures(read_rows(place, Iteration)) for place in departed)]
        found = {
            **setting,
            **figures.run_figures(read_rows(self._rows.path, Iteration), ranks),
            "epochs": [row | figures.epoch_traffic(known, row["epoch"]) for row in self.epochs],
            "evaluations": self.evaluations,
            "memory": {name: [each[name] for each in memories] for name in memory},
            "attempts": figures.attempts_of(read_rows(self.folder / ATTEMPTS, AttemptRow), self.iterations),
        }
        if "operations" in setting:
            found["operations"] = share_of_peak(setting["operations"], found["wall"]["examples_per_second_clock"])
        for name, value in {**files, SUMMARY: msgspec.to_builtins(found)}.items():
            (write_whole if isinstance(value, str) else write_json)(self.folder / name, value)
        self._is_finished = True


def _rows_in(folder: Path) -> Iterator[Path]:
    """The rows of iterations of all ranks in a folder."""
    return folder.glob(ITERATIONS.format(rank="*"))


def _rank_of(rows: Path) -> int:
    return int(rows.name.split(".")[1].removeprefix("rank"))


def _utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
