"""The flags of a run and of its ranks, the original assignment's names for some of them, and --dry_run."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from cos598d.checkpoint_flags import GROUP as CHECKPOINTS
from cos598d.checkpoints.resume import is_ours, named_folder
from cos598d.commands.flags import add_flags, given_flags
from cos598d.commands.flags import to_words as to_plain_words
from cos598d.config import RANKS, TRAINING, RunConfig
from cos598d.errors import WARNING, UsageError
from cos598d.terminal.fields import check_flags, flag, flags_of
from cos598d.terminal.printable import printable
from cos598d.world.identity import SILENCE_SECONDS, Identity, find_identity
from cos598d.world.network import DEFAULT_IP, DEFAULT_PORT


@dataclass(frozen=True)
class RankFlags:
    """The arguments of `find_identity`; None leaves one to the launcher, or to the default."""

    world_size: int | None = flag(None, "number of ranks; without --local_rank, start them all here", group=RANKS)
    local_rank: int | None = flag(None, "this process's rank, from 0 (torchrun, srun and mpirun set it)", group=RANKS)
    master_ip: str | None = flag(None, f"address of rank 0 (default: {DEFAULT_IP})", group=RANKS, metavar="ADDRESS")
    master_port: int | None = flag(None, f"port of the rendezvous on rank 0 (default: {DEFAULT_PORT})", group=RANKS)
    secret: str | None = flag(
        None,
        "file with the secret that all ranks share (else $COS598D_SECRET; not needed on one host)",
        group=RANKS,
        metavar="FILE",
    )
    silence_seconds: int | None = flag(
        None,
        f"seconds of silence after which a host counts as lost (default: {SILENCE_SECONDS})",
        group=RANKS,
    )


@dataclass(frozen=True)
class StarterFlags:
    """Flags of a command that starts the ranks itself."""

    max_restarts: int = flag(
        0,
        "restart failed local ranks up to N times, from the newest checkpoint",
        group=RANKS,
        least=0,
    )


def restarts_from(asked: int | None, identity: Identity | None) -> int:
    """How often to restart ranks that fail: --max_restarts as `asked`, 0 by default.

    Raises UsageError if a launcher has started this rank.
    """
    flags_of(StarterFlags)["max_restarts"].check("max_restarts", asked)
    if asked and identity is not None and identity.source != "local":
        raise UsageError(
            f"--max_restarts {asked} is for a command that starts the ranks itself: with --world_size N, without "
            "--local_rank. Leave it out, and let the ranks' launcher restart them."
        )
    return asked or 0


def identity_from(flags: RankFlags) -> Identity | None:
    """This process's identity from `find_identity`; None if this process has to start the ranks."""
    check_flags(flags)
    return find_identity(*astuple(flags))


LOGGING_STEPS = 50  # as in the original assignment's scripts


@dataclass(frozen=True)
class CourseFlags:
    """Other names of RunConfig's flags, as in the original assignment's scripts."""

    fp16: bool = flag(False, "the same as --precision fp16", group=TRAINING)
    per_device_train_batch_size: int | None = flag(None, "the same as --per_gpu_train_batch_size", group=TRAINING)
    per_device_eval_batch_size: int | None = flag(None, "the same as --per_gpu_eval_batch_size", group=TRAINING)
    evaluate_during_training: bool = flag(
        False, f"the same as --eval_steps N, with --logging_steps N (default: {LOGGING_STEPS})", group=CHECKPOINTS
    )
    logging_steps: int | None = flag(None, "the same as --log_every", group=CHECKPOINTS)
    save_total_limit: int | None = flag(None, "the same as --keep", group=CHECKPOINTS)


# The flags of RunConfig by their names in the original assignment.
SAME = {
    "per_device_train_batch_size": "per_gpu_train_batch_size",
    "per_device_eval_batch_size": "per_gpu_eval_batch_size",
    "logging_steps": "log_every",
    "save_total_limit": "keep",
}


def add_run_options(parser: argparse.ArgumentParser, but: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `defaults` are a task script's own, shown in the help; a flag that is not given stays None in the result.
    """
    add_flags(parser, RankFlags, StarterFlags, RunConfig, CourseFlags, shown=defaults, but=but)


def run_values(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that the user gave, under RunConfig's names, and no others. Raises UsageError."""
    values, course = given_flags(options, RunConfig), given_flags(options, CourseFlags)
    same = {SAME[name]: (f"--{name}", value) for name, value in course.items() if name in SAME}
    if course.get("fp16"):
        same["precision"] = ("--fp16", "fp16")
    if course.get("evaluate_during_training"):
        same["eval_steps"] = ("--evaluate_during_training", course.get("logging_steps", LOGGING_STEPS))
    for name, (word, value) in same.items():
        if values.get(name, value) != value:
            raise UsageError(f"{word} contradicts --{name} {values[name]}. Give only one.")
        values[name] = value
    return values


def to_words(values: Mapping[str, Any]) -> list[str]:
    """The flags that give `values`, as `run_values` returns them, on a command line."""
    return to_plain_words(values, RunConfig)


def add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flags to `parser`; `what` is printed by --dry_run."""
    section = parser.add_argument_group("dry run")
    section.add_argument(
        "--dry_run",
        action="store_true",
        help=f"start nothing; print {what}",
    )


def print_forecast(config: RunConfig, world_size: int) -> None:
    """Print what the run would cost. Raises UserError as `forecast` does."""
    from cos598d.cost.forecast import forecast, forecast_lines

    lines = forecast_lines(config, world_size, forecast(config, world_size))
    folder = named_folder(config)
    is_full = folder is not None and (folder.is_file() or (folder.is_dir() and any(folder.iterdir())))
    if folder is not None and is_full and not (config.overwrite_output_dir or is_ours(folder, config)):
        lines.insert(0, f"{WARNING}the run would be refused, because --output_dir {folder} is not empty")
    print(*map(printable, lines), sep="\n")
