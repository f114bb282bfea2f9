"""Training from Python: `cos598d.train` starts a run's ranks here and returns the run; `cos598d.compare` compares runs.
In a notebook both results appear as tables."""

import html
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cos598d.commands.flags import to_words
from cos598d.config import RunConfig, config_from, folder_name
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import COMMUNICATION, SYNCHRONIZING
from cos598d.terminal.children import end_all, exit_code_of
from cos598d.terminal.fields import flags_of
from cos598d.terminal.printable import printable
from cos598d.terminal.program import start
from cos598d.terminal.words import did_you_mean
from cos598d.tools.report.blocks import Figure, need
from cos598d.tools.report.learning import loss_blocks
from cos598d.tools.report.load import Run, load_run_as
from cos598d.tools.report.seconds import phases_blocks, seconds_blocks
from cos598d.tools.report.series import find_calls, read_calls
from cos598d.tools.report.svg import inline
from cos598d.tools.report.table import brief, brief_parts, comparison
from cos598d.tools.sweeps.runner import LastWords

# Shorter words for the flags that a notebook gives most often.
SHORT = {"task": "task_name", "model": "model_name_or_path"}
# Ranks that are asked to stop save a checkpoint first.
SECONDS_TO_STOP = 30.0


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
    last = LastWords()
    child = start([sys.executable, "-m", "cos598d", "train", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None  # a pipe, as asked for above
    try:
        for line in child.stdout:
            last.hear(line)
            if not quiet:
                print(printable(line.rstrip()), flush=True)
        child.wait()
    finally:  # also when the cell is interrupted
        end_all([child], SECONDS_TO_STOP, signal.SIGINT)
    if code := exit_code_of(child.returncode):
        raise UserError(last.words or f"the run ended with exit code {code}, and printed nothing.")


class ComparedRuns:
    """Several runs: tables, figures, and in a notebook a small table with the answers below it."""

    def __init__(self, runs: Sequence[Run]):
        self._runs = runs

    def table(self) -> str:
        """All tables, as `cos598d compare` prints them."""
        return comparison([run.summary for run in self._runs])

    def plot(self) -> "Plots":
        """The losses, the seconds and the phases of the steps, as a report draws them. Needs the `report` extra."""
        need("matplotlib")
        blocks = [*loss_blocks(self._runs), *seconds_blocks(self._runs), *phases_blocks(self._runs)]
        return Plots([block for block in blocks if isinstance(block, Figure)])

    def __repr__(self) -> str:
        return brief([run.summary for run in self._runs])

    def _repr_html_(self) -> str:
        rows, said = brief_parts([run.summary for run in self._runs])
        lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table>{table}</table>{''.join(f'<p>{html.escape(line)}</p>' for line in said)}"


class TrainedRun(ComparedRuns):
    """A run that has ended, read from its `folder`. Raises UserError if the folder has no complete run."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._run = load_run_as(self.folder, self.folder.resolve().name)
        super().__init__([self._run])

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json has: docs/run-folder.md lists it."""
        return dict(self._run.summary)

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step's global batch."""
        return list(self._run.series.losses)

    @property
    def seconds(self) -> list[float]:
        """The seconds of each step, by rank 0's clock."""
        return list(self._run.series.seconds)

    @cached_property
    def bytes(self) -> dict[str, list[int]]:
        """The bytes that each rank sent in one typical step, by tensor or bucket, in the order of rank 0's calls."""
        typical, world_size = self._run.typical, self._run.summary["world_size"]
        found: dict[str, list[int]] = {}
        for rank in range(world_size) if typical else ():
            path = self.folder / COMMUNICATION.format(rank=rank)
            for call in read_calls(path, find_calls(path).get(typical["iteration"], ())) if typical else ():
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
    usual = [f"{run.summary['sync']}-n{run.summary['world_size']}" for run in found[: len(flat)]]
    places = Counter([*usual, *named])
    names = [name if places[name] == 1 else run.name for name, run in zip(usual, found, strict=False)]
    names += named
    renamed = [replace(run, summary={**run.summary, "run": name}) for run, name in zip(found, names, strict=True)]
    return ComparedRuns(renamed)


class Plots(list[Figure]):
    """Figures of a report: `svg` is the drawing of each. A notebook shows them with their captions."""

    def __repr__(self) -> str:
        return f"<figures: {', '.join(one.name for one in self)}>"

    def _repr_html_(self) -> str:
        return "".join(
            f'<figure style="max-width: 640px">{inline(one.svg)}<p>{html.escape(" ".join(one.caption))}</p></figure>'
            for one in self
        )
