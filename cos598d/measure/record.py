"""The record of a run: rows that each rank appends while it trains, and rank 0's summary, which is written last.

A folder with a summary.json has a run that ended well. Without one it has a run that is at work, or was stopped.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError, one_line
from cos598d.measure.claim import PREDICTION_FILES
from cos598d.measure.loggers import Logger
from cos598d.measure.monitor import Monitor, peak_gpu_bytes, peak_memory_bytes
from cos598d.measure.peak import share_of_peak
from cos598d.measure.rows import RowFile, cut_after, logs_calls
from cos598d.measure.sent import Sent
from cos598d.records import figures
from cos598d.records.conventions import (
    ATTEMPTS,
    COMMUNICATION,
    CONFIG_FILE,
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
    2. A row of iterations is written when the next one begins, since bytes that are sent between two belong to the
       first. Calls have rows in the first iterations, and then rarely (`rows.logs_calls`).
    3. `resume_at` is the iteration of the checkpoint that a run resumes from, and `resumed_from` its run's folder: rows
       up to there are kept, and later ones cut off. Without it an earlier run's rows are removed.
    4. `finish` adds up the rows. A file that is complete has nothing else to be right about.

    If a file cannot be written, that is a UserError with its name.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        monitor: Monitor | None = None,
        loggers: Sequence[Logger] = (),
        *,
        world_size: int = 1,
        resume_at: int | None = None,
        resumed_from: Path | None = None,
    ):
        self.folder, self.rank, self.world_size, self.iterations = folder, rank, world_size, resume_at or 0
        self.epochs: list[Row] = []
        self.evaluations: list[Row] = []  # those inside an epoch
        self.memory: Row = {}  # of this rank, by category
        self.remark: str | None = None
        self._monitor, self._loggers, self._from = monitor, loggers, resumed_from
        self._listening: list[Logger] = []  # those whose `run` was called
        self._is_resumed, self._is_finished, self._is_training = resume_at is not None, False, False
        self._described: list[Path] = []
        self._last: Iteration | None = None  # not written yet
        self._moment: float | None = None  # end of the wall time in the rows so far; None while training pauses
        self._why = ""

    def __enter__(self) -> "RunRecord":
        with _named(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lost = self._take_up()
        names = [name.format(rank=self.rank) for name in OF_RANKS] + list(OF_RUN if self.rank == 0 else ())
        self._files = {name: RowFile(self.folder / name) for name in names}
        self._rows, calls, host = (self._files[name] for name in names[:3])
        self.ledger = Ledger(calls, logs_calls)
        self.ledger.iteration = self.iterations
        self._sent = Sent(self.ledger)  # by the iteration of `_last`, or since the row before
        if self._monitor:
            earlier = list(read_rows(host.path, Sample))
            self._monitor.open(host.add, lambda: self.ledger.iteration, earlier[-1] if earlier else None)
        if self.rank == 0:
            begun = AttemptRow(self.iterations, begun=_utc(), ranks=self.world_size, lost_iterations=lost)
            self._files[ATTEMPTS].add(begun)
        return self

    def _take_up(self) -> int:
        """Keep an earlier attempt's rows up to where this one starts; return how many iterations are lost by that."""
        names = [name.format(rank=self.rank) for name in OF_RANKS]
        if self.rank == 0:  # also for ranks that this world does not have
            places = (self._from or self.folder).glob(ITERATIONS.format(rank="*"))
            gone = [rank for rank in map(_rank_of, places) if rank >= self.world_size]
            names += [*OF_RUN, *(name.format(rank=rank) for name in OF_RANKS for rank in gone)]
            for name in (SUMMARY, *PREDICTION_FILES):
                (self.folder / name).unlink(missing_ok=True)
        if not self._is_resumed:
            for name in names:
                (self.folder / name).unlink(missing_ok=True)
            return 0
        if self._from and self._from.resolve() != self.folder.resolve():
            for name in names:
                (self.folder / name).unlink(missing_ok=True)
                if (self._from / name).exists():
                    shutil.copyfile(self._from / name, self.folder / name)
        lost = {name: self._cut(self.folder / name) for name in names if name != ATTEMPTS}
        if self.rank == 0:
            self.epochs = list(read_rows(self.folder / EPOCHS, dict))
            self.evaluations = list(read_rows(self.folder / EVALUATIONS, dict))
            known = sum(1 for _ in read_rows(self.folder / names[0], msgspec.Raw))
            if known < self.iterations:
                self.remark = f"{self.iterations - known} rows of the first {self.iterations} iterations are missing."
        return lost[names[0]]

    def _cut(self, path: Path) -> int:
        return cut_after(path, self.iterations) if path.exists() else 0

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._monitor:
            self._monitor.stop()
        why = self._why or (one_line(error) if error else "ended before its work was done")
        with contextlib.suppress(UserError, OSError):  # a full disk is not what ended the run
            self._write_last()
            if not self._is_finished:
                self._end(why)
        with contextlib.suppress(OSError):
            for file in self._files.values():
                file.close()
        if not self._is_finished and not self.iterations and not self.epochs:  # nothing that is worth a look
            for path in [*self._described, *(file.path for file in self._files.values())]:
                path.unlink(missing_ok=True)
        for logger in self._listening:
            with contextlib.suppress(UserError) if error else contextlib.nullcontext():
                logger.end({"iteration": self.iterations, "why": None if self._is_finished else why})

    def describe(self, files: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        """On rank 0: write `files` (JSON values by name) and the summary's facts, for readers during the run."""
        for name, value in {**files, SETTING: setting}.items():
            with _named(self.folder / name):
                write_json(self.folder / name, value)
                self._described.append(self.folder / name)
        for logger in self._loggers:
            logger.run(self.folder, files.get(CONFIG_FILE, {}), self.iterations)
            self._listening.append(logger)

    def ends(self, why: str) -> None:
        """Set why this attempt is about to end before its work is done."""
        self._why = why

    def _end(self, why: str) -> None:
        if self.rank == 0:
            self._files[ATTEMPTS].add(AttemptRow(self.iterations, ended=_utc(), why=" ".join(why.split())))

    def position(self) -> Row:
        """What a checkpoint needs of the record: nothing but the iteration, since the rows have the rest."""
        self._write_last()
        return {"iteration": self.iterations}

    @property
    def losses(self) -> list[float]:
        """The global batch's loss in every iteration so far, from rank 0's rows."""
        self._write_last()
        return [row.loss for row in read_rows(self._rows.path, Iteration)]

    def begin_training(self) -> None:
        """Count what is sent from now on as training's. Called before every iteration, and before a sync settles."""
        self._catch_up()
        if not self._is_training and self._monitor:
            self._monitor.begin()
        self._is_training = True
        self.begin_saving()

    def begin_saving(self) -> None:
        """Run the wall time from here: the copy for a checkpoint counts for the next iteration's seconds."""
        self._moment = self._moment or time.perf_counter()

    def pause_training(self) -> None:
        """Do not count what is sent from now on. Called before every evaluation, when the replicas are equal."""
        if not self._is_training:
            return
        self._sent.take(is_training=True)
        self._sent.count(self._monitor.pause() if self._monitor else None)
        if self._last and self._moment is not None:
            self._last.wall_seconds_after = round(time.perf_counter() - self._moment, 9)
        self._moment, self._is_training = None, False

    def iteration(
        self, facts: Row, seconds: float, phases: Mapping[str, float], counts: Mapping[str, int] | None = None
    ) -> None:
        """Add one iteration. Call it outside of its clock, so that recording is not measured, except in `wall_seconds`.

        `facts` are fields of its row, `counts` its examples' tokens or images.
        """
        if self._last:
            self._write()
        self._sent.take(is_training=True)
        self._sent.count(self._monitor.read() if self._monitor else None)
        self.iterations, now = facts["iteration"], time.perf_counter()
        timed = {"seconds": seconds, "wall_seconds": now - (self._moment or now)}
        timed |= {f"seconds_{phase}": phases[phase] for phase in PHASES}
        row = facts | {name: round(value, 9) for name, value in timed.items()} | {"wall_seconds_after": 0.0}
        spans = [(name, round(begin, 9), round(length, 9)) for name, begin, length in facts.get("spans_seconds", ())]
        row |= {"spans_seconds": spans if logs_calls(self.iterations) else []}
        self._moment = now
        self._last = Iteration(**row | dict(counts or {}) | self._sent.fields())
        for logger in self._listening:
            logger.step(msgspec.to_builtins(self._last))

    def _catch_up(self) -> None:
        """Between two iterations: add the calls since the last one to it. In training their bytes are counted too."""
        if self._sent.take(self._is_training) and self._is_training:
            self._sent.count(self._monitor.read() if self._monitor else None)

    def _write_last(self) -> None:
        self._catch_up()
        if self._last:
            self._write()

    def _write(self) -> None:
        row, self._last = self._last, None
        assert row
        self._rows.add(msgspec.structs.replace(row, **self._sent.fields()))
        self._sent.clear()

    def _of_epoch(self) -> Iterator[Iteration]:
        """The rows since the last epoch's end."""
        done = self.epochs[-1]["last_iteration"] if self.epochs else 0
        yield from (row for row in read_rows(self._rows.path, Iteration) if row.iteration > done)
        if self._last:
            yield self._last

    def epoch(self, facts: Row) -> None:
        """Add one epoch: its number, iterations, mean loss, metrics and seconds of evaluation. Training's are added."""
        row = facts | {"last_iteration": self.iterations}
        if facts["iterations"] and self.rank == 0:
            row |= {"training": figures.epoch_training(self._of_epoch())}
        self.epochs.append(row)
        self._show(EPOCHS, row)

    def evaluation(self, facts: Row) -> None:
        """Add an evaluation inside an epoch: its iteration, epoch, metrics and seconds."""
        self.evaluations.append(facts)
        self._show(EVALUATIONS, facts)

    def _show(self, name: str, row: Row) -> None:
        if self.rank == 0:
            self._files[name].add(row)
        for logger in self._listening:
            logger.evaluation({"iteration": self.iterations} | row)

    def checkpoint(self, folder: Path) -> None:
        """Report a checkpoint of the current training, which is being written to `folder`."""
        for logger in self._listening:
            logger.checkpoint({"iteration": self.iterations, "folder": str(folder)})

    def finish(self, comm: "Ranks", setting: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        """The work is done: rank 0 writes `files` (by name, JSON or text) and the summary. Every rank calls it."""
        self._write_last()
        if self._monitor:
            self._monitor.stop()
        mine = figures.rank_figures(read_rows(self._rows.path, Iteration))
        figures.added(mine["by_purpose"], self._sent.by_purpose)  # of a last checkpoint, which is in no row
        memory = {"process_peak_bytes": peak_memory_bytes(), "gpu_peak_bytes": peak_gpu_bytes(), **self.memory}
        interface = self._monitor.interface if self._monitor else None
        shares = comm.collect([mine, memory, interface and [interface.name, interface.ranks]])
        self._end(self._why or FINISHED)
        self._is_finished = shares is None
        if shares is None:
            return
        ranks, memories, interfaces = zip(*shares, strict=True)
        known = [*ranks, *(figures.rank_figures(read_rows(place, Iteration)) for place in self._departed())]
        found = {
            **setting,
            **figures.run_figures(read_rows(self._rows.path, Iteration), ranks),
            "epochs": [row | figures.epoch_traffic(known, row["epoch"]) for row in self.epochs],
            "evaluations": self.evaluations,
            "wire": figures.wire_figures(ranks, interfaces),
            "memory": {name: [each[name] for each in memories] for name in memory},
            "attempts": figures.attempts_of(read_rows(self.folder / ATTEMPTS, AttemptRow), self.iterations),
        }
        if "operations" in setting:
            found["operations"] = share_of_peak(setting["operations"], found["wall"]["examples_per_second_clock"])
        for name, value in {**files, SUMMARY: msgspec.to_builtins(found)}.items():
            with _named(self.folder / name):
                (write_whole if isinstance(value, str) else write_json)(self.folder / name, value)
        self._is_finished = True

    def _departed(self) -> list[Path]:
        """The rows of ranks that an earlier attempt had, and this one has not."""
        places = {_rank_of(place): place for place in self.folder.glob(ITERATIONS.format(rank="*"))}
        return [places[rank] for rank in sorted(places) if rank >= self.world_size]


def _rank_of(rows: Path) -> int:
    return int(rows.name.split(".")[1].removeprefix("rank"))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Convert an OSError into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be written ({error.strerror}). Make room there, or choose another "
            "--output_dir."
        ) from None


def _utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
