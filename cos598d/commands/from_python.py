"""Training from Python: `cos598d.train` starts a run's ranks here and returns the run; `cos598d.compare` compares runs.
In a notebook both results appear as tables."""

import html
import os
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from cos598d.commands.flags import to_words
from cos598d.commands.report import need
from cos598d.config import RunConfig, config_from, folder_name
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import ITERATIONS, SYNCHRONIZING
from cos598d.records.schema import Iteration, read_rows
from cos598d.records.unfinished import read_summary
from cos598d.terminal.children import end_all, exit_code_of
from cos598d.terminal.fields import flags_of
from cos598d.terminal.printable import printable
from cos598d.terminal.program import start
from cos598d.terminal.words import did_you_mean
from cos598d.tools.report.cells import texts
from cos598d.tools.report.compare import BRIEF, table
from cos598d.tools.report.records import Run, load_run
from cos598d.tools.report.tables import brief, detailed
from cos598d.tools.report.verdict import said
from cos598d.tools.sweeps.runner import last_words

# Shorter words for the flags that a notebook gives most often.
SHORT = {"task": "task_name", "model": "model_name_or_path"}
# Ranks that are asked to stop save a checkpoint first.
SECONDS_TO_STOP = 30.0
LAST_LINES = 1000  # of a run's output, among which is why it failed


def train(
    task: str = "rte", *, sync: str = "ddp", world_size: int = 1, quiet: bool = False, **flags: Any
) -> "TrainedRun":
    """Train with local ranks, each in a process of its own, as `cos598d train` does; return the run when it has ended.

    task        a task's name, such as "rte" or "digits"
    sync        a sync's or strategy's name, or "FILE.py:CLASS" for your own
    world_size  the number of ranks
    quiet       print nothing; else what the ranks print appears here, or in the notebook's cell
    flags       any flag of `cos598d train` under its name: max_steps=20, model="tiny", save_model=False,
                output_dir="runs/mine"

    An interrupt (Ctrl-C, or the notebook's stop button) ends the ranks and raises KeyboardInterrupt. Raises UsageError
    for a flag that does not exist or cannot have its value, before a process starts, and UserError with the ranks' own
    sentence if the run fails.
    """
    if type(world_size) is not int or world_size < 1:
        raise UsageError(f"train(world_size={world_size!r}) is not valid. Give a whole number of at least 1.")
    known = flags_of(RunConfig)
    values: dict[str, Any] = {"task_name": task, "sync": sync}
    for given, value in flags.items():
        name = SHORT.get(given, given)
        if name not in known:
            raise UsageError(f"train() has no argument {given!r}.{did_you_mean(given, (*known, *SHORT))}")
        value = str(value) if isinstance(value, Path) else value
        kind = known[name].kind
        if value is not None and type(value) is not kind and (type(value), kind) != (int, float):
            raise UsageError(f"train({given}={value!r}) has the wrong type. Give a value of type {kind.__name__}.")
        values[name] = value
    config = config_from(values)
    config.check(world_size)
    folder = Path(
        config.output_dir or folder_name(config, world_size, f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    ).resolve()
    words = to_words(values | {"output_dir": str(folder)}, RunConfig)
    _run([*words, "--world_size", str(world_size)], quiet)
    return TrainedRun(folder)


def _run(words: Sequence[str], quiet: bool) -> None:
    """Run `cos598d train` with these words. Raises UserError when it fails; ends it on KeyboardInterrupt."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    child = start([sys.executable, "-m", "cos598d", "train", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None  # a pipe, as asked for above
    try:
        for line in child.stdout:
            last.append(line)
            if not quiet:
                print(printable(line.rstrip()), flush=True)
        child.wait()
    finally:  # also when the cell is interrupted
        end_all([child], SECONDS_TO_STOP, signal.SIGINT)
    if code := exit_code_of(child.returncode):
        raise UserError(last_words(last) or f"the run ended with exit code {code}, and printed nothing.")


class ComparedRuns:
    """Several runs: tables, figures, and in a notebook a small table below the warnings and the fastest."""

    def __init__(self, runs: Sequence[Run]):
        self._runs = runs

    def table(self) -> str:
        """All tables, as `cos598d compare --verbose` prints them."""
        return detailed(self._runs)

    def plot(self) -> "Plots":
        """The losses, and the seconds of the steps by phase, as a report draws them. Needs the `report` extra."""
        need()
        from cos598d.tools.report import figures

        with figures.style():
            drawn = [figures.losses(self._runs), figures.seconds(self._runs)]
            return Plots(figures.as_image(one) for one in drawn if one is not None)

    def __repr__(self) -> str:
        return brief(self._runs)

    def _repr_html_(self) -> str:
        lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in texts(table(self._runs), BRIEF))
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"{''.join(f'<p>{html.escape(line)}</p>' for line in said(self._runs))}<table>{rows}</table>"


class TrainedRun(ComparedRuns):
    """A run that has ended, read from its `folder`. Raises UserError if the folder has no complete run."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        read_summary(self.folder)
        self._run = load_run(self.folder)
        super().__init__([self._run])

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json has: docs/run-folder.md lists it."""
        return msgspec.to_builtins(self._run.summary)

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step's global batch."""
        return list(self._run.summary.losses)

    @property
    def seconds(self) -> list[float]:
        """The seconds of each step, by rank 0's clock."""
        return [row.seconds for row in read_rows(self.folder / ITERATIONS.format(rank=0), Iteration)]

    @cached_property
    def bytes(self) -> dict[str, list[int]]:
        """The bytes that each rank sent in one typical step, by tensor or bucket, in the order of rank 0's calls."""
        typical, world_size = self._run.typical(), self._run.summary.world_size
        found: dict[str, list[int]] = {}
        for rank in range(world_size):
            for call in self._run.calls(typical.iteration, rank) if typical else ():
                if call["purpose"] in SYNCHRONIZING:  # not the loss, and other small sums of the loop
                    found.setdefault(call["tensor"], [0] * world_size)[rank] += call["bytes_sent"]
        return found


AnyRun = TrainedRun | str | Path


def compare(*runs: AnyRun | Sequence[AnyRun], **named: AnyRun) -> ComparedRuns:
    """Compare runs: what `train` returned, or folders of runs. `named` gives runs names of your own in the tables.

    A list of runs counts as its runs. Raises UserError for a folder that has no complete run, and UsageError if no run
    is given, or something that is no run.
    """
    flat: list[Any] = [one for given in runs for one in (given if isinstance(given, (list, tuple)) else [given])]
    if not flat and not named:
        raise UsageError("compare() has no run. Give what train() returned, or a run's folder.")
    for one in (*flat, *named.values()):
        if not isinstance(one, AnyRun):
            raise UsageError(f"compare() cannot compare {one!r}. Give what train() returned, or a run's folder.")
    found = [run._run if isinstance(run, TrainedRun) else TrainedRun(run)._run for run in (*flat, *named.values())]
    usual = [f"{run.summary.sync}-n{run.summary.world_size}" for run in found[: len(flat)]]
    places = Counter([*usual, *named])
    names = [name if places[name] == 1 else run.name for name, run in zip(usual, found, strict=False)]
    names += named
    return ComparedRuns([replace(run, name=name) for run, name in zip(found, names, strict=True)])


class Plots(list[str]):
    """Figures of a report, each as the source of an image. A notebook shows them."""

    def __repr__(self) -> str:
        return f"<{len(self)} figures>"

    def _repr_html_(self) -> str:
        return "".join(f'<img style="max-width: 640px" src="{one}">' for one in self)
