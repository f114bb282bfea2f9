"""What `demo`, `strategies`, `traffic` and `sweep` share: their flags, and how they make their runs."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from cos598d.checkpoint_flags import GROUP as CHECKPOINTS
from cos598d.commands.flags import check_at_least_one
from cos598d.commands.run_flags import add_dry_run, to_words
from cos598d.config import config_from
from cos598d.measure.claim import claim_folder
from cos598d.terminal.printable import printable
from cos598d.terminal.program import as_typed
from cos598d.terminal.signals import AskedToEnd
from cos598d.tools.runs.folder import RunsFolder
from cos598d.tools.runs.plan import PlannedRun
from cos598d.tools.runs.programs import program
from cos598d.tools.runs.results import forecast_words
from cos598d.tools.runs.runner import CommandOf, Runner
from cos598d.world.identity import Identity

Folder = TypeVar("Folder", bound=RunsFolder)
# Flags of `train` that these commands set themselves, or that have no effect on their runs; and those of ranks that
# somebody else starts.
SET_HERE = frozenset(
    ("label", "output_dir", "overwrite_output_dir", "save_model", "per_gpu_train_batch_size")
    + ("do_train", "do_eval", CHECKPOINTS)
)
OF_RANKS = frozenset(("local_rank", "master_ip", "master_port", "silence_seconds"))


def add_flags(
    parser: argparse.ArgumentParser, section: Any = None, parallel: str = "runs at a time (default: 1)"
) -> None:
    """Add --runs_dir and --parallel, to a section if there is one, and --dry_run."""
    place = parser if section is None else section
    place.add_argument(
        "--runs_dir",
        type=Path,
        metavar="FOLDER",
        help="folder for the runs; in an earlier call's folder, run only what is missing (default: a new one in runs/)",
    )
    place.add_argument("--parallel", type=int, metavar="K", help=parallel)
    add_dry_run(parser, "a row for each run: iterations, bytes and memory")


def check(options: argparse.Namespace, values: Mapping[str, Any] | None = None) -> None:
    """Raise UsageError for arguments that cannot work; `values` are RunConfig's, for --world_size ranks."""
    check_at_least_one("--parallel", options.parallel)
    if values is not None:
        Identity(0, options.world_size)  # for its checks
        config_from(values).check(options.world_size)


def folder_of(options: argparse.Namespace, name: str) -> Path:
    """The folder that was given, or a new one in runs/."""
    return options.runs_dir or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def remarks(options: argparse.Namespace) -> list[str]:
    """A remark on runs that are made at the same time."""
    if (options.parallel or 1) == 1:
        return []
    return [f"{options.parallel} runs at a time share this machine. By itself each would be faster."]


def print_forecast(options: argparse.Namespace, runs: Sequence[PlannedRun], before: Sequence[str] = ()) -> int:
    """Print what the runs will cost, then the remarks in `before`; return 0."""
    print(forecast_words(runs))
    for line in before:
        print(printable(line))
    return 0


def train_words(one: PlannedRun, path: Path) -> list[str]:
    """The arguments of `train` that make a run in its folder below `path`."""
    place = {"label": one.label, "output_dir": str((path / one.place).resolve()), "save_model": False}
    return to_words({**one.values, **place})


def _again(options: argparse.Namespace, path: Path) -> str:
    """The command that continues in the folder `path`: this one, with --runs_dir."""
    place = [] if options.runs_dir else ["--runs_dir", str(path)]
    return f"{as_typed()} {shlex.join([*sys.argv[1:], *place])}"


@contextlib.contextmanager
def made(
    options: argparse.Namespace,
    path: Path,
    runs: Sequence[PlannedRun],
    open_folder: Callable[[Path], Folder],
    before: Sequence[str] = (),
    command_of: CommandOf | None = None,
    **how: bool,
) -> Iterator[tuple[Folder, int]]:
    """Make the runs that are not finished in the folder `path`, and keep it claimed until the block ends.

    Yields the folder, and how many runs are not finished. `before` is printed first; `how` is the runner's. Without
    `command_of` each run's ranks are started on this host. Raises UserError for a folder of something else.
    """
    command_of = command_of or (lambda one, begins: program(one, [*train_words(one, path), *begins]))
    with claim_folder(path, overwrite=True, flag="--runs_dir"):
        folder = open_folder(path)
        folder.write()
        again = f"to continue there: {printable(_again(options, path))}"
        print(f"runs: {path} ({again})", flush=True)
        for line in before:
            print(printable(line), flush=True)
        runner = Runner(folder, runs, command_of, options.parallel or 1, **how)
        try:
            unfinished = runner.run()
        except (KeyboardInterrupt, AskedToEnd):
            print(f"\n{again}", flush=True)
            raise
        yield folder, unfinished
