"""`cos598d sbatch`: a script for SLURM's `sbatch` that trains, and resumes by itself after a preemption.

`srun` starts the ranks. SLURM sends each of them SIGUSR1 before the time limit, or SIGTERM on a preemption. They finish
their step, write a checkpoint and exit with code 75. Before a time limit the script requeues its job; after a
preemption SLURM does. Each attempt resumes from the newest checkpoint. `cos598d sweep --sbatch` prints one array job,
with a task for each run that is not finished."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cos598d.commands.flags import Parser, add_flags, after, given_flags
from cos598d.commands.replay import EarlierRun
from cos598d.commands.run_flags import run_values
from cos598d.config import config_from
from cos598d.errors import UsageError, UserError
from cos598d.terminal.fields import check_flags, flag
from cos598d.terminal.printable import printable
from cos598d.terminal.program import own_python_path
from cos598d.tools.report.sweep_entries import LINKS
from cos598d.tools.runs.plan import PlannedRun, Setup
from cos598d.tools.runs.programs import OURS

JOB, LIFE = "job", "time limit and restarts"
# What sbatch reads in an #SBATCH line as one argument, whatever it contains.
WORD = re.compile(r"[\w.,:;=/%@+*\[\]()&|!^~-]+", re.ASCII)
TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}", re.ASCII)
LAST_SECONDS = 65535  # before a time limit, the most that SLURM takes
TEMPLATE = Path(__file__).with_name("sbatch.sh.txt")
# Flags of a rank's identity, which srun sets.
PLACES = ("local_rank", "master_ip", "master_port")


@dataclass(frozen=True)
class BatchFlags:
    """The request to SLURM."""

    nodes: int = flag(1, "nodes of the job", group=JOB, least=1)
    ranks_per_node: int = flag(1, "ranks on each node, one for each of its GPUs", group=JOB, least=1)
    time: str | None = flag(
        None, "limit of each attempt, such as 90 (minutes), 01:00:00 or 2-12 (days-hours)", group=JOB, metavar="TIME"
    )
    gpus_per_node: int | None = flag(None, "GPUs of each node", group=JOB, least=1)
    cpus_per_rank: int | None = flag(None, "cores of each rank", group=JOB, least=1)
    mem: str | None = flag(None, "memory of each node, such as 16G", group=JOB, metavar="SIZE")
    partition: str | None = flag(None, "the queue to wait in", group=JOB)
    account: str | None = flag(None, "the account to charge", group=JOB)
    job_name: str = flag("cos598d", "the job's name in the queue", group=JOB)
    output: str | None = flag(
        None,
        "file for the output, as an sbatch file name pattern (default: the job's name and number)",
        group=JOB,
        metavar="FILE",
    )
    signal_seconds: int = flag(
        60,
        "stop the ranks this many seconds before the time limit (SLURM may be a minute early)",
        group=LIFE,
        least=1,
        below=LAST_SECONDS + 1,
    )
    max_requeues: int = flag(100, "requeue a job that reached its time limit up to N times", group=LIFE, least=0)
    max_restarts: int = flag(0, "restart failed ranks within the job up to N times", group=LIFE, least=0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and the command to run, to `parser`."""
    add_job_options(parser)
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- train FLAGS",
        help="the command to run: train, or a task's script, with its flags",
    )


def add_job_options(parser: argparse.ArgumentParser, but: Collection[str] = ()) -> None:
    """Add the flags of the request to SLURM to `parser`, without those named in `but`."""
    add_flags(parser, BatchFlags, but=but)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="OPTION",
        help="another sbatch option, such as --option=--constraint=a100; may be repeated",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell to run first, such as 'module load cuda'; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Print the script and return 0. Raises UsageError for values that SLURM, or the training, would refuse."""
    asked = job_flags(options)
    command = _command(options.program, asked.nodes * asked.ranks_per_node)
    print(script(asked, options.option, options.setup, command))
    return 0


def job_flags(options: argparse.Namespace, **shape: int) -> BatchFlags:
    """The request to SLURM, with a `shape` that has no flag. Raises UsageError for values that SLURM refuses."""
    asked = BatchFlags(**given_flags(options, BatchFlags) | shape)
    check_flags(asked)
    for name in ("mem", "partition", "account", "job_name", "output"):
        _check_word(f"--{name}", getattr(asked, name))
    for word in options.option:
        _check_word("--option", word)
        if not word.startswith("-"):
            raise UsageError(
                f"--option {word} is not valid. Give one of sbatch's own flags, such as --option=--constraint=a100."
            )
    if asked.time is not None and not TIME.fullmatch(asked.time):
        raise UsageError(
            f"--time {printable(asked.time)} is not valid. Give minutes, or HH:MM:SS, or DAYS-HH:MM:SS, such as "
            "01:00:00."
        )
    for line in options.setup:
        check_plain("--setup", line)
    return asked


def _check_word(name: str, word: str | None) -> None:
    if word is not None and not WORD.fullmatch(word):
        raise UsageError(f"{name} {printable(word, 100)!r} is not valid. Leave out spaces, quotes, # and backslashes.")


def check_plain(name: str, text: str) -> None:
    """Raise UsageError if `text`, which `name` gives, is not one line of printable characters."""
    if printable(text, sys.maxsize) != text:
        raise UsageError(
            f"{name} {printable(text, 100)} is not one line of text. Leave out line breaks and control characters."
        )


def _command(words: Sequence[str], ranks: int) -> str:
    """The command that srun starts, quoted for the shell. Raises UsageError for one that is no training or fails."""
    words = after(words, "--", "python", "python3", "-m", "cos598d")
    if not words:
        raise UsageError(
            "no training was given. Write it after --, as in `cos598d sbatch --nodes 4 -- train --sync ddp`."
        )
    for word in words:
        check_plain("the argument", word)
    if words[0] == "train":
        program = ["-m", "cos598d", "train"]
    elif words[0].endswith(".py") and Path(words[0]).is_file():
        program = [words[0]]
    else:
        raise UsageError(
            f"sbatch cannot start {words[0]}. Give train, or a task's script such as task2b/run_glue.py, and its flags."
        )
    quoted = shlex.join([sys.executable, *program, *words[1:]])
    return f"{quoted}{_where_it_goes_on(words, ranks)}"


def _where_it_goes_on(words: Sequence[str], ranks: int) -> str:
    """The flags with which each attempt finds the one before, if `words` do not have them.

    Raises UsageError for flags that cannot work, before the job waits in the queue.
    """
    from cos598d.commands import train

    task = {"task_name": "squad"} if Path(words[0]).name == "run_squad.py" else {}
    parser = Parser(prog=f"sbatch -- {words[0]}")
    train.add_options(parser, lesson=task)
    given = parser.parse_args(words[1:])
    for name in PLACES:
        if getattr(given, name) is not None:
            raise UsageError(f"--{name} {getattr(given, name)} is not needed, since srun sets it. Leave it out.")
    if given.world_size not in (None, ranks):
        raise UsageError(f"--world_size {given.world_size} does not fit the job of {ranks} ranks. Leave it out.")
    if given.resume not in (None, "auto"):
        raise UsageError(
            f"--resume {given.resume} would take a requeued job back to that point. "
            f"Leave --resume out, and give the run's folder as --output_dir."
        )
    if given.overwrite_output_dir:
        raise UsageError(
            "--overwrite_output_dir would make a requeued job start over. Leave it out, and remove the folder or give "
            "another one."
        )
    if given.dry_run:
        raise UsageError("--dry_run starts nothing, so it needs no job. Run `cos598d train --dry_run` here.")
    earlier = EarlierRun.of(given.config)
    config = config_from(earlier.values(given.lesson, run_values(given)))
    # Whether there is a GPU is seen on the nodes.
    replace(config, backend="gloo").check(ranks)
    folder = "" if config.output_dir is not None else ' --output_dir "runs/job-$SLURM_JOB_ID"'
    return folder + ("" if given.resume else " --resume auto")


def script(
    asked: BatchFlags,
    options: Sequence[str],
    setup: Sequence[str],
    command: str,
    array: str | None = None,
    shape: str = "",
) -> str:
    """The script, whose `command` srun starts as each rank, after the lines of shell in `setup`.

    `array` are the numbers of an array job's tasks, as SLURM takes them. Then `shape` has srun's flags for each task's
    own nodes and ranks.
    """
    ranks = asked.nodes * asked.ranks_per_node
    wanted = {
        "array": array,
        "job-name": asked.job_name,
        "nodes": asked.nodes,
        "ntasks": ranks,
        "ntasks-per-node": asked.ranks_per_node,
        "time": asked.time,
        "signal": f"USR1@{asked.signal_seconds}",
        "gpus-per-node": asked.gpus_per_node,
        "cpus-per-task": asked.cpus_per_rank,
        "mem": asked.mem,
        "partition": asked.partition,
        "account": asked.account,
        "output": asked.output or ("%x-%j.out" if array is None else "%x-%A_%a.out"),
        "open-mode": "append",
    }
    words = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
    cores = "" if asked.cpus_per_rank is None else f" --cpus-per-task={asked.cpus_per_rank}"
    blanks = {
        "DIRECTIVES": "\n".join(f"#SBATCH {word}" for word in (*words, "--requeue", *options)),
        "PATH": shlex.quote(own_python_path()),
        "SETUP": "\n".join(setup),
        "CORES": cores + shape,
        "COMMAND": command,
        "RESTARTS": str(asked.max_restarts),
        "REQUEUES": str(asked.max_requeues),
    }
    # In one pass: a blank within a filled-in value is not filled in.
    return re.sub(r"@([A-Z]+)@", lambda blank: blanks[blank[1]], TEMPLATE.read_text(encoding="utf-8").rstrip("\n"))


OF_SETUPS = ("nodes", "ranks_per_node")  # which the axis `setup` gives
MOST_TASKS = 1000  # SLURM's default limit
LISTS = ("option", "setup")  # flags of the job that are lists


def add_array_options(parser: argparse.ArgumentParser) -> None:
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
        for name in (*given_flags(options, BatchFlags), *(name for name in LISTS if getattr(options, name))):
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
