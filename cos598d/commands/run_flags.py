"""The flags of a run and of its ranks, and how a command becomes a rank or starts them all."""

import argparse
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from cos598d.commands.flags import add_flags
from cos598d.commands.start import exit_code_of
from cos598d.config import RANKS, RunConfig
from cos598d.terminal.fields import check_flags, flag
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


def on_ranks(flags: RankFlags, work: Callable[[Identity], int]) -> int:
    """Be the rank that the flags or a launcher name, or start all ranks here. Return the exit code.

    `work` is what each rank does. It can be pickled, for hosts where a rank is no fork.
    """
    identity = identity_from(flags)
    if identity is not None:
        return work(identity)
    from cos598d.world.launch import start_local_workers  # it loads torch

    assert flags.world_size is not None  # ranks that are to be started here have a number
    # In a process that was started here, the environment names the rank.
    return start_local_workers(flags.world_size, flags.master_port, partial(exit_code_of, on_ranks, flags, work))


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
    *("optimizer", "learning_rate", "weight_decay", "warmup_steps", "save_steps", "save_epochs", "resume"),
    *("eval_steps", "output_dir", "overwrite_output_dir", "save_model", "dry_run", "config"),
)


def add_run_options(parser: argparse.ArgumentParser, but: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `defaults` are a task script's own, shown in the help; a flag that is not given stays None in the result.
    """
    add_flags(parser, RankFlags, RunConfig, shown=defaults, but=but)
    section = parser.add_argument_group("other names, as in the original assignment")
    for name, (same, value) in ALIASES.items():
        what = {"type": int, "metavar": "N"} if value is None else {"action": "store_const", "const": value}
        words = f"the same as --{same}" + ("" if value is None else f" {value}")
        section.add_argument(f"--{name}", dest=same, help=words, default=argparse.SUPPRESS, **what)
