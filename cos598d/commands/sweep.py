"""`cos598d sweep`: a grid of settings with a run for each combination, then one table and one page.

The runs are made one after the other, or --parallel at a time. The same command with the same folder runs only what is
not finished; a run that was stopped resumes from its checkpoint.
"""

import argparse
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cos598d.commands import many_runs, sbatch, train
from cos598d.commands.flags import Parser, after, check_at_least_one
from cos598d.commands.run_flags import RankFlags, run_values
from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.measure.claim import claim_folder
from cos598d.records.quantities import parse_rate
from cos598d.terminal.fields import flags_of
from cos598d.terminal.printable import printable
from cos598d.tools.cluster.network import check_rights
from cos598d.tools.report.blocks import need
from cos598d.tools.runs.experiments import EXPERIMENTS, TASKS, ready_made
from cos598d.tools.runs.folders import SweepFolder
from cos598d.tools.runs.plan import BY_ITSELF, INSTEAD, RATE, PlannedRun, collapsed, combine, read_grid
from cos598d.tools.runs.programs import check_launch, program
from cos598d.tools.runs.results import settings_words, show_sweep

DEFAULT_RATE, MODEL = "1gbit", "bert"
NAME = re.compile(r"[\w+=@][\w.+=@-]{0,99}")
# Without any of these, only runs that are stopped write a checkpoint, which is deleted when the run has ended.
SAVING = ("save_steps", "save_epochs", "save_seconds")
EPILOG = (
    "Write `train` and the flags that all runs share after --. An axis of --grid is a flag of train without its "
    "dashes, or one of these: batch (examples per rank and micro-batch); setup (HOSTSxRANKS: 1x4 is four ranks on this "
    "host, 2x2 is two ranks on each of two emulated hosts, which needs root); delay and rate (latency and bandwidth of "
    "the links between hosts)."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`; the arguments after -- become `program`."""
    assert isinstance(parser, Parser)
    parser.ends_at_dashes("program")
    parser.epilog = EPILOG
    which = "; ".join(f"{name}: {one.words}" for name, one in EXPERIMENTS.items())
    parser.add_argument("experiment", nargs="?", choices=[*EXPERIMENTS], metavar="EXPERIMENT", help=which)
    tasks = " and ".join(f"{task} for {model}" for model, task in TASKS.items())
    section = parser.add_argument_group("what")
    section.add_argument(
        "--model",
        choices=[*TASKS],
        help=f"model of an experiment (default: {MODEL}); the task is {tasks}, unless you give one after --",
    )
    section.add_argument(
        "--published",
        action="store_true",
        help="use the published sizes: 8,000 examples, 5 epochs, 4 micro-batches per step (takes hours)",
    )
    section.add_argument(
        "--grid", action="append", default=[], metavar="AXIS=V,...", help="an axis and its values; may be repeated"
    )
    section.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="run each combination with N seeds, from --seed upwards"
    )
    section = parser.add_argument_group("execution")
    section.add_argument("--name", metavar="NAME", help="the same as --runs_dir runs/NAME")
    many_runs.add_flags(parser, section, "runs at a time (default: 1; with --sbatch: all)")
    section.add_argument(
        "--rate", metavar="RATE", help=f"bandwidth of each emulated link, or none (default: {DEFAULT_RATE})"
    )
    section.add_argument(
        "--launch",
        metavar="TEMPLATE",
        help="command that starts a run's ranks on real hosts, such as 'mpirun -np {world_size} {command}'; {hosts}, "
        "{ranks_per_host}, {rate} and {delay} are also filled in",
    )
    sbatch.add_array_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run what is not finished, print the table, write the page, and return 0, or 1 if a run is still not finished."""
    many_runs.check(options)
    asked = _Asked(options)
    sbatch.check_given(options, asked.grid)
    runs = asked.runs()
    check_launch(options.launch, runs)
    path = _folder(options)
    before = [*asked.remarks(), *many_runs.remarks(options)]
    refused = [f"{settings_words(one.settings)} is left out: {one.refused}" for one in runs if one.refused]
    before += dict.fromkeys(refused)
    if options.dry_run:
        return many_runs.print_forecast(options, runs, before)

    open_folder = partial(SweepFolder, asked=asked.state())
    if options.sbatch:
        # The later call that prints the table reads this state.
        with claim_folder(path, overwrite=True, flag="--runs_dir"):
            folder = open_folder(path)
            missing = [one for one in runs if not one.refused and not folder.look(one)[0]]
            text = sbatch.array_job(options, missing, lambda one: many_runs.train_words(one, path))
            folder.write()
        print(text)
        sbatch.say_where(path, len(missing))
        return 0
    need("jinja2", "matplotlib")  # now, and not when hours have been spent
    if options.launch is None and any(one.setup.hosts > 1 for one in runs if not one.refused):
        check_rights()

    def command_of(one: PlannedRun, begins: Sequence[str]) -> list[str]:
        cluster_name = f"sweep{os.getpid()}x{runs.index(one)}"
        return program(one, [*many_runs.train_words(one, path), *begins], options.launch, cluster_name)

    how = {"goes_on": True, "keeps": asked.keeps}
    with many_runs.made(options, path, runs, open_folder, before, command_of, **how) as (folder, unfinished):
        show_sweep(path, folder.entries(runs), asked.title, asked.remarks())
    return int(unfinished > 0)


class _Asked:
    """What a call asks for: the axes, and the flags that all runs share."""

    def __init__(self, options: argparse.Namespace):
        check_at_least_one("--seeds", options.seeds)
        flags = _shared_flags(options.program)
        self._first = flags.pop("seed", RunConfig.seed)
        self._count, self._launch = options.seeds, options.launch
        self.grid = read_grid(options.grid)
        self.title = "A sweep"
        if options.experiment:
            model = options.model or MODEL
            self.grid, flags = ready_made(options.experiment, model, options.published, self.grid, flags)
            self.title = f"{options.experiment} with {model}: {EXPERIMENTS[options.experiment].words}"
        elif options.model or options.published:
            word = "--published" if options.published else f"--model {options.model}"
            raise UsageError(f"{word} is only for {', '.join(EXPERIMENTS)}. Name one of them, or leave {word} out.")
        elif not self.grid:
            raise UsageError(
                f"sweep has nothing to vary. Give axes, such as --grid batch=1,4 --grid setup=1x1,1x4, or one of "
                f"{', '.join(EXPERIMENTS)}."
            )
        if options.rate is not None and RATE in self.grid:
            raise UsageError(f"--rate {options.rate} and --grid {RATE} exclude each other. Give one.")
        self.flags, self.rate = flags, options.rate or DEFAULT_RATE
        parse_rate(self.rate)

    @property
    def keeps(self) -> bool:
        """Whether to keep the runs' checkpoints: a flag or an axis asks for some."""
        return any(name in self.flags or name in self.grid for name in SAVING)

    @property
    def seeds(self) -> list[int]:
        """The runs' seeds."""
        return [self._first + number for number in range(self._count)]

    def runs(self) -> list[PlannedRun]:
        """All runs. Raises UsageError for a grid that cannot be."""
        own = {} if self.keeps else {"save_epochs": 0}
        return combine(self.grid, {**self.flags, **own}, self.seeds, self.rate)

    def state(self) -> dict[str, Any]:
        """The settings that a later call in the same folder must have, too."""
        axes = {name: list(words) for name, words in self.grid.items()}
        return {"axes": axes, "seeds": self.seeds, "flags": self.flags, "rate": self.rate, "launch": self._launch}

    def remarks(self) -> list[str]:
        """Remarks on the grid, which come before the table."""
        return [*filter(None, [collapsed(self.grid)])]


def _shared_flags(words: Sequence[str]) -> dict[str, Any]:
    """The values of the flags of `train FLAGS`. Raises UsageError for another program, and flags that sweep sets."""
    words = after(words, "python", "python3", "-m", "cos598d", "train")
    if words and not words[0].startswith("-"):
        raise UsageError(f"a sweep runs only train, not {printable(words[0], 60)}. Write -- train FLAGS.")
    parser = Parser(prog="sweep -- train")
    train.add_options(parser)
    given = parser.parse_args(words)
    for name in flags_of(RankFlags):
        if getattr(given, name) is not None:
            why = INSTEAD.get(name, "the sweep starts the ranks itself. Leave it out")
            raise UsageError(f"--{name} {getattr(given, name)}: {why}.")
    if given.config is not None:
        raise UsageError(f"--config {given.config} cannot be used in a sweep. Give the run's flags after -- instead.")
    if given.dry_run:
        raise UsageError("--dry_run is a flag of sweep, not of train. Write it before the --.")
    values = run_values(given)
    if values.get("do_eval") and not values.get("do_train"):
        raise UsageError("--do_eval without --do_train trains nothing. Add --do_train, or leave --do_eval out.")
    for name in values:
        if INSTEAD.get(name) == BY_ITSELF:
            raise UsageError(f"--{name} after --: {BY_ITSELF}.")
    return values


def _folder(options: argparse.Namespace) -> Path:
    if options.name is None:
        what = f"{options.experiment}-{options.model or MODEL}" if options.experiment else "sweep"
        return many_runs.folder_of(options, what)
    if options.runs_dir is not None:
        raise UsageError(f"--name {options.name} and --runs_dir {options.runs_dir} exclude each other. Give one.")
    if not NAME.fullmatch(options.name):
        raise UsageError(
            f"--name {printable(options.name, 100)} is not valid. Give up to 100 letters, digits and . _ - + = @, "
            "without a dot or dash at the start."
        )
    return Path("runs") / options.name
