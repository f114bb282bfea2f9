"""The runs of a sweep, made in their order: which are there already, what is started, and what is said of each."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cos598d.checkpoints import FOLDER as CHECKPOINTS
from cos598d.checkpoints import remove_all
from cos598d.errors import UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, LEFT_OUT
from cos598d.terminal.locks import is_locked
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import GOES_ON
from cos598d.tools.sweep.plan import Combination
from cos598d.tools.sweep.programs import program
from cos598d.tools.sweep.progress import Progress, seconds_words
from cos598d.tools.sweep.results import result_words
from cos598d.tools.sweep.runner import Ended, LoggedProgram, run_jobs
from cos598d.tools.sweep.state import LOGS, SweepFolder

# How long a run of a call that was killed may take to end, until one of this call takes its folder.
ENDING_SECONDS = 20.0


class Making:
    """What is left to do of a sweep, and the lines that tell of it.

    words_of    the words of `train` that make a combination's run, in its folder
    launch      what starts the ranks of a run; None: this command
    keeps       whether checkpoints of finished runs stay
    """

    def __init__(
        self,
        folder: SweepFolder,
        combinations: Sequence[Combination],
        words_of: Callable[[Combination], list[str]],
        launch: str | None,
        parallel: int,
        keeps: bool,
    ):
        self._folder, self._words_of, self._launch = folder, words_of, launch
        self._parallel, self._keeps = parallel, keeps
        self._all = [one for one in combinations if not one.refused]
        self._left_out = [one for one in combinations if one.refused]
        self._places = {one.label: place for place, one in enumerate(self._all, start=1)}
        self._waiting = {one.label: one for one in self._all}
        self._progress = Progress(parallel)
        self._at_a_time = 1
        self.unfinished = 0  # how many have failed, or stopped before their end

    def run(self) -> None:
        """Make the runs that are not finished. Raises KeyboardInterrupt or Stopped when a signal has asked for it."""
        for one in self._left_out:
            self._folder.end(one, LEFT_OUT, one.refused)
        jobs = [job for one in self._all if (job := self._job(one))]
        self._at_a_time = min(self._parallel, len(jobs))
        run_jobs(jobs, self._parallel, self._begin, self._end)

    def _job(self, one: Combination) -> LoggedProgram | None:
        """What makes the run; None where it is finished."""
        found, damage = self._folder.look(one)
        if found:
            seconds = self._folder.seconds(one)
            self._folder.end(one, FINISHED, seconds=seconds)
            if seconds is not None:
                self._progress.add(one, seconds)
            del self._waiting[one.label]
            self._tidy(one)
            print(f"{self._head(one)} finished before: {result_words(found)}", flush=True)
            return None
        if again := damage or self._folder.said(one.label):
            print(f"{self._head(one)} run again, since {printable(again)}", flush=True)
        words = [*self._words_of(one), *(["--overwrite_output_dir"] if damage else ["--resume", "auto"])]
        command = program(one, words, self._launch, f"sweep{os.getpid()}x{self._places[one.label]}")
        return LoggedProgram(one.label, command, self._folder.path / LOGS / f"{one.label}.txt")

    def _begin(self, job: LoggedProgram) -> None:
        one = self._waiting[job.label]
        deadline = time.monotonic() + ENDING_SECONDS
        while is_locked(self._folder.path / one.label) and time.monotonic() < deadline:
            time.sleep(0.1)  # a run of an earlier call, which was killed, is saving what it has
        self._folder.begin(one, self._at_a_time)
        if self._parallel == 1:
            print(f"{self._head(one)} ", end="", flush=True)

    def _end(self, job: LoggedProgram, ended: Ended) -> None:
        one = self._waiting.pop(job.label)
        head = "" if self._parallel == 1 else f"{self._head(one)} "
        words = self._words_of_end(one, ended)
        left = None if ended.is_asked else self._progress.left([*self._waiting.values()])
        about = f"; about {seconds_words(left)} left" if left and self._waiting else ""
        print(printable(f"{head}{words}{about}"), flush=True)

    def _words_of_end(self, one: Combination, ended: Ended) -> str:
        """How the run has ended, noted in the state too."""
        if ended.code == 0:
            try:
                found = self._folder.run_of(one)
            except UserError as error:
                return self._failed(one, FAILED, f"its files are not valid: {error}")
            if found:
                # Of one that went on, only the last of its attempts was timed.
                is_whole = len(found.summary.get("attempts", [])) < 2
                self._folder.end(one, FINISHED, seconds=ended.seconds if is_whole else None)
                if is_whole:
                    self._progress.add(one, ended.seconds)
                self._tidy(one)
                span = "in all" if is_whole else "since it went on"
                return f"{result_words(found)}; {seconds_words(ended.seconds)} {span}"
        if ended.is_asked:
            return self._failed(one, BROKEN_OFF, "it was broken off.")
        if ended.code == GOES_ON:
            return self._failed(one, BROKEN_OFF, "it stopped early. Repeat the command to resume it.")
        said = ended.last or "it said nothing."
        return self._failed(one, FAILED, f"it failed with exit code {ended.code}: {said}")

    def _tidy(self, one: Combination) -> None:
        checkpoints = self._folder.path / one.label / CHECKPOINTS
        if not self._keeps and not checkpoints.is_symlink():  # what lies elsewhere is not the sweep's
            remove_all(checkpoints)

    def _failed(self, one: Combination, outcome: str, said: str) -> str:
        self.unfinished += 1
        self._folder.end(one, outcome, said)
        return f"{said.rstrip('.')}; {self._log(one)}" if outcome == FAILED else said

    def _log(self, one: Combination) -> Path:
        return self._folder.path / LOGS / f"{one.label}.txt"

    def _head(self, one: Combination) -> str:
        return f"[{self._places[one.label]}/{len(self._all)}] {one.label}:"
