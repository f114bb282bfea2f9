"""`cos598d sweep --sbatch`: one array job for SLURM, with a task for each run that is not finished."""

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Sequence

from cos598d.commands.flags import given_flags
from cos598d.commands.sbatch import BatchFlags, add_job_options, check_plain, job_flags, script
from cos598d.errors import UsageError, UserError
from cos598d.tools.report.sweep_entries import LINKS
from cos598d.tools.runs.plan import PlannedRun, Setup
from cos598d.tools.runs.programs import OURS

OF_SETUPS = ("nodes", "ranks_per_node")  # which the axis `setup` gives
MOST_TASKS = 1000  # SLURM's default limit
WORDS = ("option", "setup")  # flags of the job that are lists


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --sbatch and the flags of the request to SLURM to `parser`."""
    parser.add_argument(
        "--sbatch",
        action="store_true",
        help="only print a SLURM script with one task per run; for the table, run the command again without --sbatch",
    )
    add_job_options(parser, but=OF_SETUPS)


def check_given(options: argparse.Namespace, axes: Collection[str]) -> None:
    """Raise UsageError for flags of the job without --sbatch, and for flags and axes that an array job cannot have."""
    if not options.sbatch:
        for name in (*given_flags(options, BatchFlags), *(name for name in WORDS if getattr(options, name))):
            meant = " For the axis setup, write --grid setup=2x2." if name == "setup" else ""
            raise UsageError(f"--{name} is only for --sbatch. Leave --{name} out, or add --sbatch.{meant}")
        return
    if options.dry_run:
        raise UsageError("--dry_run and --sbatch exclude each other, since neither starts anything. Give only one.")
    if options.launch is not None:
        raise UsageError("--launch and --sbatch exclude each other, since srun starts the ranks. Leave --launch out.")
    if options.name is None and options.runs_dir is None:
        raise UsageError(
            "--sbatch needs the folder of the sweep. Give --name or --runs_dir, and give the same again for the table."
        )
    for name in LINKS:
        if name in axes:
            raise UsageError(f"--grid {name} is for emulated hosts, which a job does not have. Leave it out.")


def array_job(
    options: argparse.Namespace, combinations: Sequence[PlannedRun], words_of: Callable[[PlannedRun], list[str]]
) -> str:
    """The script, with a task for each combination. `words_of` returns the arguments of `train` that make its run."""
    if not combinations:
        raise UserError("all runs of this sweep are finished. For the table, run the command again without --sbatch.")
    if len(combinations) > MOST_TASKS:
        raise UserError(
            f"the sweep has {len(combinations)} runs, and an array job {MOST_TASKS} at most. Split the grid."
        )
    shape = {
        "nodes": max(one.setup.hosts for one in combinations),
        "ranks_per_node": max(one.setup.ranks_per_host for one in combinations),
    }
    asked = job_flags(options, **shape)
    lines = ["case ${SLURM_ARRAY_TASK_ID:-} in"]
    for number, one in enumerate(combinations):
        words = [*words_of(one), "--resume", "auto"]
        for word in words:
            check_plain("the argument", word)
        command = shlex.join([*OURS, "train", *words])
        lines += [f"{number})", f"    shape=({_of_step(one.setup)})", f"    set -- {command}", "    ;;"]
    no_task = "error: this is an array job. Submit it with sbatch."
    lines += ["*)", f'    echo "{no_task}" >&2', "    exit 2", "    ;;", "esac"]
    at_a_time = "" if options.parallel is None else f"%{options.parallel}"
    array = f"0-{len(combinations) - 1}{at_a_time}"
    return script(asked, options.option, [*options.setup, *lines], '"$@"', array, ' "${shape[@]}"')


def say_where(path: object, tasks: int) -> None:
    """Print what the script is for, and how to get the table, on standard error: standard output has the script."""
    print(
        f"an array job of {tasks} tasks, with its runs in {path}. When it has ended, run the command again without "
        "--sbatch for the table. Runs that are still missing then run here.",
        file=sys.stderr,
    )


def _of_step(setup: Setup) -> str:
    return f"--nodes={setup.hosts} --ntasks={setup.world_size} --ntasks-per-node={setup.ranks_per_host}"
