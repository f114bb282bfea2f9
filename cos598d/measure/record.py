"""The record of a run: what each rank writes while it trains and where that goes on, and rank 0's summary of it."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from cos598d.comm.ledger import Ledger, Totals
from cos598d.measure.attempts import Attempts, find_earlier, why
from cos598d.measure.earlier import Earlier, Position
from cos598d.measure.figures import read_back, run_figures
from cos598d.measure.host import peak_gpu_bytes, peak_memory_bytes
from cos598d.measure.live import FACTS, clear
from cos598d.measure.monitor import Monitor
from cos598d.measure.rank_files import RankFiles, bring_departed, publish_departed, remove_published, row_text
from cos598d.measure.refusals import NOTHING_DONE, OLD_IS_GONE, told
from cos598d.measure.tally import Tally
from cos598d.measure.tensorboard import Board, remove_events
from cos598d.measure.thinning import Detail
from cos598d.measure.totals import epoch_traffic
from cos598d.measure.wire import Counters
from cos598d.records.ledger_rule import AUTO
from cos598d.records.live import (
    ATTEMPTS,
    COMMUNICATION,
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
from cos598d.records.run import EVALUATION, read_table
from cos598d.terminal.files import Staged, json_text, own_folder, remove_known, write_json
from cos598d.world.exit import tell_no_more, tell_of_the_end


class RunRecord:
    """One rank's part of a run's record: its rows, and rank 0's summary, which comes last: then all is there.

    Use as a context; `ledger` is the ledger to hand to the communicator. Until `publish` the rows are in the folder's
    `live/`, each there as soon as it is written, so that they can be read and outlive the process. A `monitor` adds
    samples taken while training goes on, a `board` is shown everything at once. `kept` is what --ledger says. In
    memory an iteration leaves nothing.

    `resume` are the positions that all ranks of an earlier world gave, in order of rank, each the same list: the rows
    go on after them, and what came later is cut off. They are looked for in `live/`, in the folder itself, and in that
    of `resumed_from`. Where some are gone, `remark` says so.

    A file that does not fit on the disk is a UserError that names it, and says what is safe.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        monitor: Monitor | None = None,
        board: Board | None = None,
        *,
        world_size: int = 1,
        kept: str = AUTO,
        resume: Sequence[Position] | None = None,
        resumed_from: Path | None = None,
    ):
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self._monitor, self._board = monitor, board
        self._others = [] if resumed_from is None else [resumed_from]
        self._earlier = Earlier(resume, rank, world_size)
        self.iterations = self._earlier.iterations
        self._detail, self._tally = Detail(kept, rank, world_size), Tally()
        self._is_training = False
        self.epochs: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []  # those within an epoch
        # Of this rank, by category: "between_steps", "peak", and what a formula expects of both.
        self.memory: dict[str, Any] = {}
        self.remark: str | None = None

    def __enter__(self) -> "RunRecord":
        self._staged = Staged()
        self._attempts: Attempts | None = None
        self._is_published = False
        with told(self.folder, NOTHING_DONE), self._cleared_if_it_fails():
            live = self.folder / LIVE
            own_folder(live)
            if self.rank == 0:
                earlier = find_earlier([live, *(other / LIVE for other in self._others)], self._earlier.own)
                self._attempts = Attempts(live / ATTEMPTS, earlier, self.iterations, self.world_size)
                bring_departed(self.folder, self.world_size, self._earlier.departed, self._others)
            self._files = RankFiles(self.folder, self.rank, self._earlier.sizes, self._others)
        self._iterations = self._files.file(ITERATIONS)
        self._last_row = ""  # of the last iteration, as it was written
        self.ledger = Ledger(self._files.file(COMMUNICATION), self._detail.calls)
        self.ledger.iteration = self.iterations
        if self._monitor:
            wire, host = self._files.file(WIRE), self._files.file(HOST)
            self._monitor.open(wire, host, lambda: self.ledger.iteration, self._detail.wire)
        if self._earlier.own:
            self._resume(self._earlier.own)
        tell_of_the_end(self._ends_early)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: TracebackType | None) -> None:
        if self._monitor:
            self._monitor.stop()
        if self._board:
            self._board.close()
        self._staged.close()
        self._files.close()
        if self._attempts and not self._is_published:
            if self._attempts.all[-1]["why"] is None:
                self._attempts.end(why(error), self.iterations)
            with contextlib.suppress(OSError):  # a full disk is not what the run ended for
                self._attempts.write()
        if error is None:  # else the process is about to say what it ends for
            tell_no_more(self._ends_early)
        if not self._is_published and not self.iterations and not self.epochs:
            self._clear_up()  # nothing was done that anybody could look at

    def describe(self, files: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        """Rank 0: write `files` (JSON values by their names) and the summary's facts, for who looks on meanwhile."""
        with told(self.folder, NOTHING_DONE):
            for name, value in {**files, SETTING: setting}.items():
                write_json(self.folder / LIVE / name, value)

    def ends(self, why: str) -> None:
        """Why this attempt is about to end before its work is done, for `attempts`."""
        if self._attempts:
            self._attempts.end(why, self.iterations)

    def _ends_early(self, sentence: str) -> None:
        """What this process says when it leaves tells more than the error of a collective that lost a rank."""
        if self._attempts and not self._is_published:
            self._attempts.correct(" ".join(sentence.split()), self.iterations)

    def position(self) -> Position:
        """Where this rank's record stands between two iterations (JSON), for `resume`."""
        self._catch_up()
        sizes = self._files.sizes()
        # To the last row is added what travels before the next step: the checkpoint has it, and the file those before.
        sizes[self._iterations.path.name] -= len(self._last_row)
        found = {
            "iteration": self.iterations,
            "files": sizes,
            "row": json.loads(self._last_row) if self._last_row else None,
            "tally": self._tally.position(),
            "ledger": self.ledger.position(),
            "detail": self._detail.position(),
            "monitor": self._monitor.position() if self._monitor else None,
        }
        if self._attempts:
            found |= {"epochs": self.epochs, "attempts": self._attempts.all}
            found |= {"departed": {str(rank): one for rank, one in self._earlier.departed.items()}}
        return json.loads(json.dumps(found))  # as it comes back, and not what still changes

    def _resume(self, position: Position) -> None:
        self._tally.resume(position["tally"])
        self.ledger.resume(position["ledger"])
        self._detail.resume(position["detail"])
        if self._monitor and position["monitor"]:
            self._monitor.resume(position["monitor"])
        self._last_row = row_text(position.get("row"))
        self._iterations.write(self._last_row)
        if self.rank == 0:
            self.epochs = [dict(row) for row in position["epochs"]]
            for row in self.epochs:
                self._show(EPOCHS, row)
            rows = read_table(self._files.file(EVALUATIONS).path, EVALUATION)
            self.evaluations = [dict(row) for row in rows]
        if not self._files.is_whole:
            self.remark = f"some rows of the first {self.iterations} iterations are gone from {self.folder}."

    def remove_old(self, with_model: bool) -> None:
        """Rank 0: remove what an earlier run left in a folder that is overwritten, its model too where asked.

        Called when all that comes in its place is whole on the disk of every rank.
        """
        with told(self.folder):
            remove_published(self.folder)
            if not self._board:
                remove_events(self.folder)
            if with_model:
                remove_known(self.folder / MODEL, MODEL_FILES)

    @property
    def losses(self) -> list[float]:
        """The global batch's loss in every iteration so far, as the rows of rank 0 have it."""
        return list(read_back(self._iterations.path, "loss")["loss"])

    def to_disk(self) -> None:
        """Bring the rows so far to the disk, from whichever thread, so that a power cut spares them. Raises OSError."""
        self._files.complete()

    def complete(self) -> None:
        """Bring this rank's rows whole to the disk. After this, when it went well on every rank, `publish` has room."""
        self._catch_up()
        with told(self.folder):
            self._files.complete()

    def publish(self) -> None:
        """Give this rank's rows their names in the run's folder, in place of an earlier run's."""
        self._catch_up()
        with told(self.folder, OLD_IS_GONE):
            self._files.publish()
        self._is_published = True
        if self.rank:
            self._clear_up()

    @contextlib.contextmanager
    def _cleared_if_it_fails(self) -> Iterator[None]:
        """Leave nothing of a record that could not be begun."""
        try:
            yield
        except BaseException:
            if not self.iterations:
                clear(self.folder)
            raise

    def begin_training(self) -> None:
        """What travels from now on is training's. Called before every iteration, and before a sync settles."""
        self._catch_up()
        if self._is_training:
            return
        self._is_training = True
        if self._monitor:
            self._monitor.begin()
        self._tally.begin()

    def begin_saving(self) -> None:
        """The copy for a checkpoint is part of the next iteration's seconds, so the wall's time runs from here on."""
        self._tally.begin()

    def pause_training(self) -> None:
        """What travels from now on is not training's. Called before every evaluation, when the replicas are equal."""
        if self._is_training:
            self._add_to_last(*self._take(), self._monitor.pause() if self._monitor else None)
            self._tally.pause()
        self._is_training = False

    def iteration(
        self, facts: dict[str, Any], seconds: float, phases: dict[str, float], counts: Mapping[str, int] | None = None
    ) -> None:
        """Add one iteration. Called off its clock, so that recording is not what is measured; `wall_seconds` has it.

        `counts` are what its examples come to, as `Examples.counts` says, for the epoch's speed.
        """
        self.iterations = facts["iteration"]
        counted = self._monitor.end_iteration(self.iterations) if self._monitor else None
        row = facts | self._tally.iteration(facts, seconds, phases, *self._take(), counted, counts or {})
        written = self._detail.of_row(row)
        self._last_row = row_text(written)
        with told(self.folder):
            self._iterations.write(self._last_row)
        if self._board:
            self._board.iteration(row)

    def _take(self) -> tuple[tuple[int, int], Totals]:
        """Write what calls there were since this was called last, and return what they moved."""
        with told(self.folder):
            return self.ledger.take()

    def _catch_up(self) -> None:
        """Between two iterations: write what calls there were since the last one; in training they are that one's."""
        moved, totals = self._take()
        if self._is_training and any(moved):
            self._add_to_last(moved, totals, self._monitor.read() if self._monitor else None)

    def _add_to_last(self, moved: tuple[int, int], totals: Totals, counted: Counters | None) -> None:
        """Add to the last iteration, and to its row, what has travelled since."""
        bytes_now = self._tally.add_to_last(self.iterations, moved, totals, counted)
        if not self._last_row:
            return
        row = json.loads(self._last_row)
        row |= bytes_now | {name: row.get(name, 0) + more for name, more in asdict(totals).items()}
        with told(self.folder):
            self._iterations.replace_last(len(self._last_row), row_text(row))
        self._last_row = row_text(row)

    def epoch(self, facts: dict[str, Any]) -> None:
        """Add one epoch: its number, iterations, mean loss, metrics and seconds of evaluation. Training's are added."""
        self.epochs.append(self._tally.epoch(facts, self.iterations))
        self._show(EPOCHS, self.epochs[-1])
        if self._board:
            self._board.epoch(self.epochs[-1])

    def evaluation(self, facts: dict[str, Any]) -> None:
        """Add an evaluation within an epoch: after which iteration, in which epoch, its metrics and its seconds."""
        self.evaluations.append(facts)
        self._show(EVALUATIONS, facts)
        if self._board:
            self._board.evaluation(facts)

    def _show(self, name: str, row: dict[str, Any]) -> None:
        if self.rank == 0:
            with told(self.folder):
                self._files.file(name).write(json.dumps(row) + "\n")

    def share(self) -> dict[str, Any]:
        """What rank 0 needs of this rank for the summary: mean seconds by phase, and mean bytes an iteration.

        Training is over: this ends the sampling.
        """
        self._catch_up()
        if self._monitor:
            self._monitor.stop()
        return self._tally.share(self._monitor.interface if self._monitor else None) | {
            "ledger": self.ledger.position(),
            "memory": {"process_peak_bytes": peak_memory_bytes(), "gpu_peak_bytes": peak_gpu_bytes(), **self.memory},
        }

    def stage(self, facts: dict[str, Any], shares: Sequence[dict[str, Any]], others: Mapping[str, Any]) -> None:
        """Rank 0: write summary.json, epochs.jsonl and `others` (JSON values by their files' names), all yet unnamed.

        `shares` are all ranks', in order of rank. NaN and infinities are refused (ValueError).
        """
        assert self._attempts  # rank 0's
        traffic = [share["traffic"] for share in shares] + self._earlier.departed_traffic()
        for epoch in self.epochs:
            epoch |= epoch_traffic(traffic, epoch["epoch"])
        found = run_figures(shares, self._iterations.path, self._detail.kept) | {"wall": self._tally.wall_summary()}
        found |= {"epochs": self.epochs, "attempts": self._attempts.finished(self.iterations)}
        found |= {"evaluations": self.evaluations} if self.evaluations else {}
        texts = {name: json_text(value) for name, value in others.items()}
        texts[EPOCHS] = "".join(json.dumps(epoch) + "\n" for epoch in self.epochs)
        texts["summary.json"] = json_text(facts | found)
        with told(self.folder):
            for name, text in texts.items():
                self._staged.write(self.folder / name, text)

    def publish_summary(self) -> None:
        """Rank 0, when all rows have their names: give what is staged its own, the summary last."""
        with told(self.folder, OLD_IS_GONE):
            publish_departed(self.folder, self.world_size)
            self._staged.publish()
        self._clear_up()

    def _clear_up(self) -> None:
        """Take away this rank's part of `live/`: what was in it has a name of its own, or is worth none."""
        if self.rank == 0:
            remove_known(self.folder / LIVE, FACTS)
        self._files.remove()
