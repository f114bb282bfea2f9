"""The record of a run: the files that each rank writes during training, and rank 0's summary of them."""

import contextlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cos598d.comm.ledger import Ledger, Totals
from cos598d.errors import UserError
from cos598d.measure.attempts import Attempts, find_earlier, why
from cos598d.measure.claim import FACTS, NOTHING_DONE, OLD_IS_GONE, clear, told
from cos598d.measure.iterations import IterationRows, Row, last_text, row_text, sums_at
from cos598d.measure.loggers import CsvLogger, Logger, remove_tables
from cos598d.measure.monitor import Monitor, peak_gpu_bytes, peak_memory_bytes
from cos598d.measure.peak import share_of_peak
from cos598d.measure.row_files import RankFiles, remove_published, rows_of_others, take_up_departed
from cos598d.measure.tensorboard import Board, remove_events
from cos598d.measure.thinning import AUTO, Detail
from cos598d.measure.wire import Counters
from cos598d.records.conventions import (
    ATTEMPTS,
    COMMUNICATION,
    CONFIG_FILE,
    EPOCHS,
    EVALUATIONS,
    HOST,
    ITERATIONS,
    LIVE,
    MODEL,
    MODEL_FILES,
    SETTING,
    WIRE,
)
from cos598d.records.figures import (
    RankSums,
    epoch_traffic,
    epoch_training,
    ledger_figures,
    run_figures,
    wall_figures,
    wire_figures,
    without_rows,
)
from cos598d.records.kinds import NUMBER, Fields
from cos598d.records.run import EVALUATION, read_table
from cos598d.terminal.files import Staged, json_text, own_folder, remove_known, write_json

Position = dict[str, Any]


class RunRecord:
    """One rank's part of a run's record: its rows, and rank 0's summary, which is written last.

    Use it as a context; pass its `ledger` to the communicator. Until `publish` the rows are in the folder's `live/`.
    Each is written at once, so it can be read and survives the process. A `monitor` adds samples during training. Rank
    0's `loggers` get everything at once. `kept` is the value of --ledger. Iterations take no memory.

    `resume` are the positions of all ranks of an earlier attempt, in order of rank, the same list on each. The rows
    continue after them, and later rows are cut off. They are looked for in `live/`, in the folder itself, and in that
    of `resumed_from`. If some are missing, `remark` reports it.

    If a file does not fit on the disk, that is a UserError with its name, and with what is safe.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        monitor: Monitor | None = None,
        loggers: Sequence[Logger] = (),
        *,
        world_size: int = 1,
        kept: str = AUTO,
        resume: Sequence[Position] | None = None,
        resumed_from: Path | None = None,
    ):
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self._monitor, self._loggers = monitor, loggers
        self._listening: list[Logger] = []  # those whose `run` was called
        self._others = [] if resumed_from is None else [resumed_from]
        by_rank = dict(enumerate(resume or []))
        if resume:
            by_rank = {int(other): one for other, one in resume[0]["departed"].items()} | by_rank
        self._own = by_rank.get(rank)  # None if this rank did not exist before
        # Rank 0 keeps the positions of ranks that this world does not have, for a later one that has them again.
        self._departed = {other: by_rank[other] for other in sorted(by_rank) if other >= world_size and rank == 0}
        self.iterations = max((one["iteration"] for one in by_rank.values()), default=0)
        self._detail = Detail(kept, rank, world_size)
        self._is_training = False
        self.epochs: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []  # those inside an epoch
        # Of this rank, by category: "between_steps", "peak", and what a formula expects for both.
        self.memory: dict[str, Any] = {}
        self.remark: str | None = None

    def __enter__(self) -> "RunRecord":
        self._staged = Staged()
        self._attempts: Attempts | None = None
        self._is_published = False
        try:
            with told(self.folder, NOTHING_DONE):
                self._open_files()
        except BaseException:
            if not self.iterations:
                clear(self.folder)  # leave nothing of a record that could not be started
            raise
        files = self._files.by_name
        self._rows = IterationRows(files[ITERATIONS], self._detail)
        self.ledger = Ledger(files[COMMUNICATION], self._detail.calls)
        self.ledger.iteration = self.iterations
        if self._monitor:
            self._monitor.open(files[WIRE].write, files[HOST].write, lambda: self.ledger.iteration, self._detail.wire)
        if self._own:
            self._resume(self._own)
        return self

    def _open_files(self) -> None:
        live = self.folder / LIVE
        own_folder(live)
        if self.rank == 0:
            earlier = find_earlier([live, *(other / LIVE for other in self._others)], self._own)
            self._attempts = Attempts(live / ATTEMPTS, earlier, self.iterations, self.world_size)
            departed = {other: (one["files"], last_text(one)) for other, one in self._departed.items()}
            take_up_departed(self.folder, self.world_size, departed, self._others)
        sizes = self._own["files"] if self._own else {}
        self._files = RankFiles(self.folder, self.rank, sizes, self._others)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: TracebackType | None) -> None:
        if self._monitor:
            self._monitor.stop()
        said = None if self._is_published else (self._attempts and self._attempts.all[-1]["why"]) or why(error)
        self._staged.close()
        self._files.close()
        if self._attempts and not self._is_published:
            with contextlib.suppress(OSError):  # a full disk is not what ended the run
                if self._attempts.all[-1]["why"] is None:
                    self.ends(why(error))
                self._attempts.write()
        if not self._is_published and not self.iterations and not self.epochs:
            self._clear_up()  # nothing was done that is worth a look
        try:
            self._tell("end", {"iteration": self.iterations, "why": said})
        except UserError:
            if error is None:  # otherwise the run ends with that error
                raise

    def describe(self, files: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        """On rank 0: write `files` (JSON values by name) and the summary's facts, for readers during the run."""
        with told(self.folder, NOTHING_DONE):
            for name, value in {**files, SETTING: setting}.items():
                write_json(self.folder / LIVE / name, value)
            for logger in self._loggers:
                logger.run(self.folder, files.get(CONFIG_FILE, {}), self.iterations)
                self._listening.append(logger)

    def ends(self, why: str) -> None:
        """Set why this attempt is about to end before its work is done, for `attempts`."""
        if self._attempts:
            self._attempts.end(why, self.iterations)

    def position(self) -> Position:
        """The position of this rank's record between two iterations (JSON), for `resume`."""
        self._catch_up()
        sizes = self._files.sizes()
        sizes[self._files.by_name[ITERATIONS].path.name] = self._rows.size
        found = {
            "iteration": self.iterations,
            "files": sizes,
            **self._rows.position(),
            "ledger": self.ledger.position(),
            "monitor": self._monitor.position() if self._monitor else None,
        }
        if self._attempts:
            found |= {"epochs": self.epochs, "attempts": self._attempts.all}
            found |= {"departed": {str(rank): one for rank, one in self._departed.items()}}
        return json.loads(json.dumps(found))  # a copy, because the original still changes

    def _resume(self, position: Position) -> None:
        self._rows.resume(position)
        self.ledger.resume(position["ledger"])
        if self._monitor and position["monitor"]:
            self._monitor.resume(position["monitor"])
        if self.rank == 0:
            self.epochs = [dict(row) for row in position["epochs"]]
            for row in self.epochs:
                self._show(EPOCHS, row)
            self.evaluations = [dict(row) for row in read_table(self._files.by_name[EVALUATIONS].path, EVALUATION)]
        if not self._files.is_whole:
            self.remark = f"some rows of the first {self.iterations} iterations are missing in {self.folder}."

    def remove_old(self, with_model: bool) -> None:
        """On rank 0: remove an earlier run's files from a folder that is overwritten, and its model too if asked.

        Called when everything that replaces them is on the disk of every rank.
        """
        with told(self.folder):
            remove_published(self.folder)
            logged = {type(logger) for logger in self._listening}
            if Board not in logged:
                remove_events(self.folder)
            if CsvLogger not in logged:
                remove_tables(self.folder)
            if with_model:
                remove_known(self.folder / MODEL, MODEL_FILES)

    @property
    def losses(self) -> list[float]:
        """The global batch's loss in every iteration so far, from rank 0's rows."""
        return list(_read_back(self._files.by_name[ITERATIONS].path, "loss")["loss"])

    def to_disk(self) -> None:
        """Sync the rows so far to the disk, from any thread, so that they survive a power cut. Raises OSError."""
        self._files.complete()

    def complete(self) -> None:
        """Sync all of this rank's rows to the disk. If that worked on every rank, `publish` cannot run out of room."""
        self._catch_up()
        with told(self.folder):
            self._files.complete()

    def publish(self) -> None:
        """Give this rank's rows their final names in the run's folder, replacing an earlier run's."""
        self._catch_up()
        with told(self.folder, OLD_IS_GONE):
            self._files.publish()
        self._is_published = True
        if self.rank:
            self._clear_up()

    def begin_training(self) -> None:
        """Count what is sent from now on as training's. Called before every iteration, and before a sync settles."""
        self._catch_up()
        if self._is_training:
            return
        self._is_training = True
        if self._monitor:
            self._monitor.begin()
        self.begin_saving()

    def begin_saving(self) -> None:
        """Run the wall time from here: the copy for a checkpoint counts for the next iteration's seconds."""
        self._rows.begin()

    def pause_training(self) -> None:
        """Do not count what is sent from now on. Called before every evaluation, when the replicas are equal."""
        if self._is_training:
            self._add_to_last(*self._take(), self._monitor.pause() if self._monitor else None)
            self._rows.pause()
        self._is_training = False

    def iteration(
        self, facts: Row, seconds: float, phases: Mapping[str, float], counts: Mapping[str, int] | None = None
    ) -> None:
        """Add one iteration. Call it outside of its clock, so that recording is not measured, except in `wall_seconds`.

        `counts` are its examples' tokens or images, from `Examples.counts`, for the epoch's speed.
        """
        self.iterations = facts["iteration"]
        counted = self._monitor.end_iteration(self.iterations) if self._monitor else None
        moved, totals = self._take()
        with told(self.folder):
            row = self._rows.add(facts, seconds, phases, moved, totals, counted, counts or {})
        self._tell("step", row)

    def _take(self) -> tuple[tuple[int, int], Totals]:
        """Write the calls since the last `_take`, and return the bytes that they moved."""
        with told(self.folder):
            return self.ledger.take()

    def _catch_up(self) -> None:
        """Between two iterations: write the calls since the last one. During training they count for that one."""
        moved, totals = self._take()
        if self._is_training and any(moved):
            self._add_to_last(moved, totals, self._monitor.read() if self._monitor else None)

    def _add_to_last(self, moved: tuple[int, int], totals: Totals, counted: Counters | None) -> None:
        """Add what was sent since the last iteration to it, and to its row."""
        with told(self.folder):
            self._rows.add_to_last(moved, totals, counted)

    def epoch(self, facts: Row) -> None:
        """Add one epoch: its number, iterations, mean loss, metrics and seconds of evaluation. Training's are added."""
        row = facts | {"last_iteration": self.iterations}
        if facts["iterations"] and (sums := self._rows.sums().epoch(facts["epoch"])):
            earlier = [one for one in self.epochs if one["epoch"] == facts["epoch"]]
            row |= {"training": epoch_training(without_rows(sums, earlier))}
        self.epochs.append(row)
        self._show(EPOCHS, row)
        self._tell("evaluation", row | {"iteration": self.iterations})

    def evaluation(self, facts: Row) -> None:
        """Add an evaluation inside an epoch: its iteration, epoch, metrics and seconds."""
        self.evaluations.append(facts)
        self._show(EVALUATIONS, facts)
        self._tell("evaluation", facts)

    def checkpoint(self, folder: Path) -> None:
        """Report a checkpoint of the current training, which is being written to `folder`."""
        self._tell("checkpoint", {"iteration": self.iterations, "folder": str(folder)})

    def _tell(self, call: str, row: Row) -> None:
        with told(self.folder):
            for logger in self._listening:
                getattr(logger, call)(row)

    def _show(self, name: str, row: Row) -> None:
        if self.rank == 0:
            with told(self.folder):
                self._files.by_name[name].write(row_text(row))

    def share(self) -> dict[str, Any]:
        """What rank 0 needs from this rank for the summary (JSON): its sums, and its memory.

        It ends the sampling, since training is over.
        """
        self._catch_up()
        if self._monitor:
            self._monitor.stop()
        interface = self._monitor.interface if self._monitor else None
        return {
            "sums": self._rows.sums().table,
            "interface": interface and [interface.name, interface.ranks],
            "ledger": self.ledger.position(),
            "memory": {"process_peak_bytes": peak_memory_bytes(), "gpu_peak_bytes": peak_gpu_bytes(), **self.memory},
        }

    def stage(self, facts: dict[str, Any], shares: Sequence[dict[str, Any]], others: Mapping[str, Any]) -> None:
        """On rank 0: write summary.json, epochs.jsonl and `others` under temporary names.

        `others` are by file name: text for .tsv, else a JSON value. `shares` are all ranks', in order of rank. Raises
        ValueError for NaN and infinities.
        """
        assert self._attempts  # rank 0 has them
        ranks = [RankSums(share["sums"]) for share in shares]
        departed = [sums_at(one) for one in self._departed.values()]
        for epoch in self.epochs:
            epoch |= epoch_traffic([*ranks, *departed], epoch["epoch"])
        rows = _read_back(self._files.by_name[ITERATIONS].path, "loss", "seconds")
        found = run_figures(ranks, rows["loss"], rows["seconds"]) | {
            "ledger": ledger_figures(self._detail.kept, [share["ledger"] for share in shares]),
            "wire": wire_figures(ranks, [share["interface"] for share in shares]),
            "memory": {name: [share["memory"][name] for share in shares] for name in shares[0]["memory"]},
            "wall": wall_figures(ranks[0].run(after_warm_up=True)),
            "epochs": self.epochs,
            "attempts": self._attempts.finished(self.iterations),
        }
        found |= {"evaluations": self.evaluations} if self.evaluations else {}
        if "operations" in facts:
            found["operations"] = share_of_peak(facts["operations"], found["wall"]["examples_per_second_clock"])
        texts = {name: value if name.endswith(".tsv") else json_text(value) for name, value in others.items()}
        texts[EPOCHS] = "".join(map(row_text, self.epochs))
        texts["summary.json"] = json_text(facts | found)
        with told(self.folder):
            for name, text in texts.items():
                self._staged.write(self.folder / name, text)

    def publish_summary(self) -> None:
        """On rank 0, when all rows have their names: give the staged files theirs, the summary last."""
        with told(self.folder, OLD_IS_GONE):
            for path in rows_of_others(self.folder / LIVE, self.world_size):
                os.replace(path, self.folder / path.name)
            self._staged.publish()
        self._clear_up()

    def _clear_up(self) -> None:
        """Remove this rank's part of `live/`: its contents have other names now, or are of no use."""
        if self.rank == 0:
            remove_known(self.folder / LIVE, FACTS)
        self._files.remove()


def _read_back(rows: Path, *names: str) -> dict[str, array]:
    """These numbers of all rows of a file of iterations, 8 bytes each: they need not stay in memory during the run.

    Raises UserError for a damaged row: a resumed run reads rows that it has not written itself.
    """
    found = {name: array("d") for name in names}
    for row in read_table(rows, Fields(dict.fromkeys(names, NUMBER))):
        for name, values in found.items():
            values.append(row[name])
    return found
