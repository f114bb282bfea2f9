"""`cos598d traffic`: how much travels in an epoch, by batch size and precision, predicted and counted."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from cos598d.checkpoint_flags import GROUP as LIFE
from cos598d.commands.cluster import add_link_flags, add_name_flags, cluster_from
from cos598d.commands.run_flags import add_run_options, run_values, to_words
from cos598d.config import RunConfig
from cos598d.errors import UsageError, UserError, flag_called
from cos598d.measure.claim import claim_folder
from cos598d.records.conventions import PRECISIONS
from cos598d.terminal.program import own_environment, own_python_path
from cos598d.tools.cluster.hosts import run_on_hosts
from cos598d.tools.cluster.live import live_cluster
from cos598d.tools.report.load import load_run
from cos598d.tools.report.traffic_table import traffic_table

BATCH_SIZES, PRECISION = "64,32,16", "fp32"
# What this command sets itself, one value for each run.
NOT_HERE = frozenset(
    (
        "total_train_batch_size",
        "per_gpu_train_batch_size",
        "per_device_train_batch_size",
        "precision",
        "fp16",
        "output_dir",
        "overwrite_output_dir",
    )
    + ("do_train", "do_eval", "save_model", "label", "monitor_interval", "max_restarts", LIFE)
)
DEFAULTS = {"sync": "all_reduce", "num_train_epochs": 1.0, "save_epochs": 0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`: its own, the emulated cluster's, and those of a run."""
    section = parser.add_argument_group("what")
    section.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="only tabulate these records, run nothing")
    section.add_argument(
        "--batch_sizes", default=BATCH_SIZES, metavar="N,N", help=f"examples a step (default: {BATCH_SIZES})"
    )
    section.add_argument(
        "--precision",
        default=PRECISION,
        metavar="NAME,NAME",
        help=f"some of {', '.join(PRECISIONS)} (default: {PRECISION})",
    )
    section.add_argument(
        "--runs_dir", type=Path, metavar="FOLDER", help="folder for the records (default: a new one in runs/)"
    )
    section.add_argument("--markdown", action="store_true", help="the table in Markdown")
    section.add_argument(
        "--loopback", action="store_true", help="ranks of this host without a cluster (no root): all count on one wire"
    )
    section = parser.add_argument_group("emulated hosts (else, with --local_rank, real ones over their interfaces)")
    add_link_flags(section)
    add_name_flags(section)
    add_run_options(parser, but=NOT_HERE, **DEFAULTS)


def run(options: argparse.Namespace) -> int:
    """Train with every batch size and precision, each as a run of its own, and print the table of their records."""
    folders = options.runs
    if not folders:
        folders = _train_all(options)
        if options.local_rank:  # rank 0's host has the whole table
            return 0
    print(traffic_table([load_run(folder) for folder in folders], options.markdown))
    return 0


def _train_all(options: argparse.Namespace) -> list[Path]:
    sizes = [_number(word) for word in options.batch_sizes.split(",")]
    precisions = options.precision.split(",")
    values: dict[str, Any] = DEFAULTS | {
        name: value for name, value in run_values(options).items() if name != "precision"
    }
    runs_dir = options.runs_dir or Path("runs") / f"traffic-{datetime.now():%Y%m%d-%H%M%S}"
    settings = list(product(precisions, sizes))
    for precision, size in settings:  # before the first of them takes its time
        with flag_called("--batch_sizes", there="--total_train_batch_size"):
            RunConfig(**values, precision=precision, total_train_batch_size=size, do_train=True).check(_ranks(options))
    folders = []
    with claim_folder(runs_dir, overwrite=False), _starter(options) as start:
        for place, (precision, size) in enumerate(settings, start=1):
            folder = (runs_dir / f"batch{size}-{precision}").resolve()
            print(f"\n[{place}/{len(settings)}] {size} examples a step, {precision}", flush=True)
            own = {"total_train_batch_size": size, "precision": precision, "output_dir": folder, "do_train": True}
            words = to_words(values | own | {"label": folder.name, "save_model": False})
            exit_code = start([sys.executable, "-m", "cos598d", "train", *words])
            if exit_code:
                raise UserError(f"{folder.name} ended with exit code {exit_code}; see its error above.")
            folders.append(folder)
    print()
    return folders


def _ranks(options: argparse.Namespace) -> int:
    """How many ranks a run will have. Raises UsageError where the flags do not say it."""
    if options.local_rank is not None and options.world_size is None:
        raise UsageError(f"--local_rank {options.local_rank} needs --world_size: how many ranks are there in all?")
    is_emulated = options.local_rank is None and not options.loopback
    if is_emulated and options.world_size not in (None, options.hosts):
        raise UsageError(f"--world_size {options.world_size}: emulated hosts have a rank each, give --hosts.")
    return options.world_size or options.hosts


@contextmanager
def _starter(options: argparse.Namespace) -> Iterator[Callable[[list[str]], int]]:
    """What runs a command as every rank (or as this one) and returns its exit code."""

    def here(*place: Any) -> Callable[[list[str]], int]:
        def start(words: list[str]) -> int:
            words = [*words, *map(str, place)]
            return subprocess.run(words, env=own_environment(), check=False).returncode

        return start

    def given(*names: str) -> list[str]:
        return [word for name in names if getattr(options, name) for word in (f"--{name}", str(getattr(options, name)))]

    lines = given("secret", "silence_seconds")
    if options.local_rank is not None:
        place = given("master_ip", "master_port")
        yield here("--local_rank", options.local_rank, "--world_size", options.world_size, *place, *lines)
    elif options.loopback:
        yield here("--world_size", _ranks(options), *lines)
    else:
        os.environ["PYTHONPATH"] = own_python_path()
        with live_cluster(cluster_from(options), options.show) as cluster:
            yield lambda words: run_on_hosts(cluster, [*words, *lines], 1)


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"--batch_sizes: {word!r} is not a number: give some like {BATCH_SIZES}.") from None
