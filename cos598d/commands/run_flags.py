"""The flags of a run and of its ranks, the original assignment's names for some of them, and --dry_run."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from cos598d.checkpoints.resume import is_ours, named_folder
from cos598d.commands.flags import add_flags, given_flags
from cos598d.commands.flags import to_words as to_plain_words
from cos598d.config import RANKS, RunConfig
from cos598d.errors import WARNING
from cos598d.terminal.fields import check_flags, flag
from cos598d.terminal.printable import printable
from cos598d.world.identity import Identity, find_identity
from cos598d.world.network import DEFAULT_IP, DEFAULT_PORT


@dataclass(frozen=True)
class RankFlags:
    """The arguments of `find_identity`; None leaves one to the launcher, or to the default."""

    world_size: int | None = flag(None, "number of ranks; without --local_rank, start them all here", group=RANKS)
    local_rank: int | None = flag(None, "this process's rank, from 0 (torchrun, srun and mpirun set it)", group=RANKS)
    master_ip: str | None = flag(None, f"address of rank 0 (default: {DEFAULT_IP})", group=RANKS, metavar="ADDRESS")
    master_port: int | None = flag(None, f"port of the rendezvous on rank 0 (default: {DEFAULT_PORT})", group=RANKS)


def identity_from(flags: RankFlags) -> Identity | None:
    """This process's identity from `find_identity`; None if this process has to start the ranks."""
    check_flags(flags)
    return find_identity(*astuple(flags))


# Other names of flags, which scripts for transformers and the original assignment use: the flag, and the value that a
# switch gives it.
ALIASES = {
    "fp16": ("precision", "fp16"),
    "per_device_train_batch_size": ("per_gpu_train_batch_size", None),
    "per_device_eval_batch_size": ("per_gpu_eval_batch_size", None),
    "logging_steps": ("log_every", None),
    "save_total_limit": ("keep", None),
    "evaluate_during_training": ("eval_steps", 50),
}
# What --help shows; --help all shows the rest.
FREQUENT = (
    *("world_size", "local_rank", "master_ip", "master_port", "sync", "compress", "bucket_mb", "backend", "threads"),
    *("task_name", "data_dir", "max_seq_length", "max_train_examples", "max_eval_examples", "model_type"),
    *("model_name_or_path", "do_train", "do_eval", "total_train_batch_size", "per_gpu_train_batch_size"),
    *("gradient_accumulation_steps", "max_grad_norm", "num_train_epochs", "max_steps", "seed", "precision"),
    *(
        "optimizer",
        "learning_rate",
        "weight_decay",
        "warmup_steps",
        "save_steps",
        "save_epochs",
        "resume",
        "eval_steps",
    ),
    *("output_dir", "overwrite_output_dir", "save_model", "dry_run", "config"),
)


def add_run_options(parser: argparse.ArgumentParser, but: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `defaults` are a task script's own, shown in the help; a flag that is not given stays None in the result.
    """
    add_flags(parser, RankFlags, RunConfig, shown=defaults, but=but)
    section = parser.add_argument_group("other names, as in the original assignment")
    for name, (same, value) in ALIASES.items():
        what: dict[str, Any] = (
            {"type": int, "metavar": "N"} if value is None else {"action": "store_const", "const": value}
        )
        words = f"the same as --{same}" + ("" if value is None else f" {value}")
        section.add_argument(f"--{name}", dest=same, help=words, default=argparse.SUPPRESS, **what)


def run_values(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that the user gave, under RunConfig's names, and no others."""
    return given_flags(options, RunConfig)


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
