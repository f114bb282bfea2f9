"""The runner of many runs: which exist already, what is started, and what is printed and recorded for each.

`demo`, `strategies`, `traffic` and `sweep` plan their runs and tabulate the results; this makes the runs.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from cos598d.errors import UserError
from cos598d.records.conventions import BROKEN_OFF, CHECKPOINTS, FAILED, FINISHED, LEFT_OUT
from cos598d.terminal.locks import is_locked
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import GOES_ON
from cos598d.tools.runs.folder import RunsFolder
from cos598d.tools.runs.jobs import Ended, Job, run_jobs
from cos598d.tools.runs.plan import PlannedRun
from cos598d.tools.runs.results import result_words, seconds_words

LOGS = "logs"
# How long a run of a killed call may take to end before a run of this call takes its folder.
ENDING_SECONDS = 20.0
# Arguments of `train` by which a run continues in its folder, or starts over.
RESUMED, AFRESH = ("--resume", "auto"), ("--overwrite_output_dir",)

# called with a run, and RESUMED or AFRESH; returns its program
CommandOf = Callable[[PlannedRun, Sequence[str]], Sequence[str]]


class Runner:
    """The runs that are left to do, and the lines that report them.

    command_of   the program that makes a run, which continues or starts over as its arguments ask
    parallel     how many at a time. With one at a time the output `is_shown`, if asked; otherwise it goes to a file
    goes_on      an interrupted run continues; otherwise it starts over, so that its seconds are complete
    keeps        whether checkpoints of finished runs are kept
    has_record   whether this program finds the record: of the ranks of one run, the first has it
    needs_all    a run that fails ends the call, since the table needs all of them
    """

    def __init__(
        self,
        folder: RunsFolder,
        runs: Sequence[PlannedRun],
        command_of: CommandOf,
        parallel: int = 1,
        *,
        is_shown: bool = False,
        goes_on: bool = False,
        keeps: bool = False,
        has_record: bool = True,
        needs_all: bool = False,
    ):
        self._folder, self._command_of, self._parallel = folder, command_of, parallel
        self._is_shown, self._goes_on, self._keeps = is_shown and parallel == 1, goes_on, keeps
        self._has_record, self._needs_all = has_record, needs_all
        self._all = [one for one in runs if not one.refused]
        self._left_out = [one for one in runs if one.refused]
        self._numbers = {one.place: number for number, one in enumerate(self._all, start=1)}
        self._waiting = {one.place: one for one in self._all}
        self._again: dict[str, str] = {}  # why an existing run is made again
        self._progress = Progress(parallel)
        self._at_a_time = 1
        self._unfinished = 0  # how many have failed, or stopped before their end

    def run(self) -> int:
        """Make the runs that are not finished. Return how many are still unfinished after that.

        Raises KeyboardInterrupt or AskedToEnd if a signal asks for it.
        """
        jobs = [job for one in self._all if (job := self._job(one))]
        self._at_a_time = min(self._parallel, len(jobs))
        run_jobs(jobs, self._parallel, self._begin, self._end)
        for one in self._left_out:
            self._folder.end(one, LEFT_OUT, one.refused)
        return self._unfinished

    def _job(self, one: PlannedRun) -> Job | None:
        """The job that makes the run; None if it is finished."""
        found, damage = self._folder.look(one)
        if found:
            seconds = self._folder.seconds(one)
            self._folder.end(one, FINISHED, seconds=seconds)
            if seconds is not None:
                self._progress.add(one, seconds)
            del self._waiting[one.place]
            self._tidy(one)
            words = "not run again" if self._is_shown else result_words(found)
            self._say(f"{self._head(one)} finished before{',' if self._is_shown else ':'} {words}")
            return None
        if again := damage or self._folder.said(one):
            self._again[one.place] = f" run again, since {printable(again)}"
        command = self._command_of(one, RESUMED if self._goes_on and not damage else AFRESH)
        return Job(one.place, command, None if self._is_shown else self._log(one))

    def _begin(self, job: Job) -> None:
        one = self._waiting[job.place]
        deadline = time.monotonic() + ENDING_SECONDS
        while is_locked(self._folder.path / one.place) and time.monotonic() < deadline:
            time.sleep(0.1)  # a run of an earlier call, which was killed, is saving its state
        self._folder.begin(one, self._at_a_time)
        again = self._again.get(one.place, "")
        if again or self._is_shown:
            self._say(f"{self._head(one)}{again}".removesuffix(":"))
        if self._parallel == 1 and not self._is_shown:
            print(f"{self._head(one)} ", end="", flush=True)

    def _end(self, job: Job, ended: Ended) -> None:
        one = self._waiting.pop(job.place)
        words, is_finished = self._words_of_end(one, ended)
        if self._needs_all and not is_finished and not ended.is_asked:
            where = "see its error above" if self._is_shown else f"see {self._log(one)}"
            raise UserError(f"{one.label} failed with exit code {ended.code}; {where}.")
        if self._is_shown:
            return
        head = "" if self._parallel == 1 else f"{self._head(one)} "
        left = None if ended.is_asked else self._progress.left([*self._waiting.values()])
        about = f"; about {seconds_words(left)} left" if left and self._waiting else ""
        print(printable(f"{head}{words}{about}"), flush=True)

    def _words_of_end(self, one: PlannedRun, ended: Ended) -> tuple[str, bool]:
        """How the run has ended, also recorded in the state, and whether it is finished."""
        if ended.code == 0 and not self._has_record:
            self._folder.end(one, FINISHED, seconds=ended.seconds)
            return "done", True
        if ended.code == 0:
            try:
                found = self._folder.run_of(one)
            except UserError as error:
                return self._failed(one, FAILED, f"it wrote a damaged record: {error}"), False
            if found:
                # Only the last of a resumed run's attempts was timed.
                is_whole = len(found.summary.get("attempts", [])) < 2
                self._folder.end(one, FINISHED, seconds=ended.seconds if is_whole else None)
                if is_whole:
                    self._progress.add(one, ended.seconds)
                self._tidy(one)
                span = "in all" if is_whole else "since it went on"
                return f"{result_words(found)}; {seconds_words(ended.seconds)} {span}", True
        if ended.is_asked:
            return self._failed(one, BROKEN_OFF, "it was broken off."), False
        if ended.code == GOES_ON and self._goes_on:
            words = "it stopped before its end. Start the sweep again, and it resumes."
            return self._failed(one, BROKEN_OFF, words), False
        said = ended.last or "it said nothing."
        return self._failed(one, FAILED, f"it failed with exit code {ended.code}: {said}"), False

    def _tidy(self, one: PlannedRun) -> None:
        checkpoints = self._folder.path / one.place / CHECKPOINTS
        if not self._keeps and not checkpoints.is_symlink():  # files elsewhere are not ours
            shutil.rmtree(checkpoints, ignore_errors=True)

    def _failed(self, one: PlannedRun, outcome: str, said: str) -> str:
        self._unfinished += 1
        self._folder.end(one, outcome, said)
        return f"{said.rstrip('.')}; {self._log(one)}" if outcome == FAILED else said

    def _log(self, one: PlannedRun) -> Path:
        return self._folder.path / LOGS / f"{one.place.replace(os.sep, '-')}.txt"

    def _head(self, one: PlannedRun) -> str:
        return f"[{self._numbers[one.place]}/{len(self._all)}] {one.head}:"

    def _say(self, line: str) -> None:
        """Print a line, after an empty one if runs print too."""
        print(f"\n{line}" if self._is_shown else line, flush=True)


class Progress:
    """The seconds of finished runs, and a prediction for the others.

    A run is predicted to take the mean of finished runs: with equal settings, else with an equal set-up, else of all.
    """

    def __init__(self, parallel: int):
        self._parallel = parallel
        self._known: list[tuple[PlannedRun, float]] = []

    def add(self, one: PlannedRun, seconds: float) -> None:
        """Add a run that has ended well, with its total seconds."""
        self._known.append((one, seconds))

    def left(self, others: Sequence[PlannedRun]) -> float | None:
        """Seconds until these runs have ended; None if none has ended so far."""
        if not self._known:
            return None
        return sum(self._expected(one) for one in others) / min(self._parallel, max(1, len(others)))

    def _expected(self, one: PlannedRun) -> float:
        alike = [known for known in self._known if known[0].name == one.name]
        near = alike or [known for known in self._known if known[0].setup == one.setup] or self._known
        return fmean(seconds for _, seconds in near)
