"""`cos598d traffic`: the bytes sent in an epoch, by batch size and precision, predicted and counted.

The same command with the same folder runs only what is not finished.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cos598d.commands import many_runs
from cos598d.commands.cluster import add_link_flags, add_name_flags, cluster_from
from cos598d.commands.flags import to_words
from cos598d.commands.run_flags import add_run_options, run_values
from cos598d.config import RunConfig
from cos598d.errors import UsageError, UserError, flag_called
from cos598d.records.conventions import PRECISIONS
from cos598d.tools.cluster.network import check_rights
from cos598d.tools.report.load import load_run
from cos598d.tools.report.traffic_table import traffic_table
from cos598d.tools.runs.folder import AskedFolder
from cos598d.tools.runs.plan import PlannedRun, Setup
from cos598d.tools.runs.programs import OURS

BATCH_SIZES, PRECISION = "64,32,16", "fp32"
# What this command sets itself, one value for each run.
NOT_HERE = many_runs.SET_HERE | {
    *("total_train_batch_size", "per_device_train_batch_size", "precision", "fp16", "monitor_interval")
}
DEFAULTS = {"sync": "all_reduce", "num_train_epochs": 1.0, "save_epochs": 0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`: its own, the emulated cluster's, and those of a run."""
    section = parser.add_argument_group("what")
    section.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="only print the table, of these runs")
    section.add_argument(
        "--batch_sizes", default=BATCH_SIZES, metavar="N,N", help=f"examples per step (default: {BATCH_SIZES})"
    )
    section.add_argument(
        "--precision",
        default=PRECISION,
        metavar="NAME,NAME",
        help=f"precisions: one or more of {', '.join(PRECISIONS)} (default: {PRECISION})",
    )
    many_runs.add_flags(parser, section, "runs at a time, each on its own emulated hosts (default: 1)")
    section.add_argument("--markdown", action="store_true", help="print all columns, in Markdown")
    section.add_argument(
        "--loopback",
        action="store_true",
        help="run all ranks on this host, without emulated hosts: needs no root, but the ranks share one byte counter",
    )
    section = parser.add_argument_group("emulated hosts (with --local_rank: real hosts instead)")
    add_link_flags(section)
    add_name_flags(section)
    add_run_options(parser, but=NOT_HERE, **DEFAULTS)


def run(options: argparse.Namespace) -> int:
    """Train with every batch size and precision, each as a run of its own, and print the table of the runs."""
    many_runs.check(options)
    folders = options.runs
    if not folders:
        runs = _planned(options)
        if options.dry_run:
            return many_runs.print_forecast(options, runs)
        folders = _train_all(options, runs)
        if options.local_rank:  # rank 0's host has the whole table
            return 0
    print(traffic_table([load_run(folder) for folder in folders], options.markdown))
    return 0


def _planned(options: argparse.Namespace) -> list[PlannedRun]:
    sizes = [_number(word) for word in options.batch_sizes.split(",")]
    given = {name: value for name, value in run_values(options).items() if name != "precision"}
    values: dict[str, Any] = DEFAULTS | given | {"do_train": True}
    ranks = _ranks(options)
    if ranks < 2:
        flag = "--hosts" if _is_emulated(options) else "--world_size"
        raise UsageError(f"{flag} {ranks} is too few, since one rank sends nothing. Give 2 or more.")
    setup, rate, delay = Setup(1, ranks), None, 0.0
    if _is_emulated(options):
        cluster = cluster_from(options)
        setup, rate, delay = Setup(cluster.hosts, 1), cluster.rate, cluster.delay
    elif (options.parallel or 1) > 1:
        raise UsageError(
            f"--parallel {options.parallel} needs emulated hosts, since on one host each run would count the others' "
            "bytes. Leave it out, or leave out --loopback or --local_rank."
        )
    runs = []
    for precision, size in product(options.precision.split(","), sizes):
        own = values | {"precision": precision, "total_train_batch_size": size}
        with flag_called("--batch_sizes", there="--total_train_batch_size"):
            RunConfig(**own).check(ranks)  # before the first of them takes its time
        label = f"batch{size}-{precision}"
        head = f"{size} examples per step, {precision}"
        runs.append(PlannedRun(label, label, label, head, setup, own, rate=rate, delay=delay))
    return runs


def _train_all(options: argparse.Namespace, runs: Sequence[PlannedRun]) -> list[Path]:
    """Make the runs that are not finished; the folders of all. Raises UserError if one fails."""
    path = many_runs.folder_of(options, "traffic")
    is_of_several = options.local_rank is not None
    if is_of_several and path.is_dir() and any(path.iterdir()):
        # Ranks on other hosts cannot see what is finished here.
        raise UserError(f"--runs_dir {path} is not empty. Choose another folder.")
    if _is_emulated(options):
        check_rights()
    named = ("hosts", "rate", "delay", "offload", "loopback", "batch_sizes", "precision", "world_size")
    flags = {name: getattr(options, name) for name in named}
    shared = {name: value for name, value in runs[0].values.items() if name not in ("total_train_batch_size", *named)}
    open_folder = partial(AskedFolder, asked={"flags": shared | flags}, what="traffic")

    def command_of(one: PlannedRun, begins: Sequence[str]) -> list[str]:
        words = [*OURS, "train", *many_runs.train_words(one, path), *begins]
        words += _given(options, "silence_seconds")
        if is_of_several:
            place = ["--local_rank", str(options.local_rank), "--world_size", str(one.setup.world_size)]
            return [*words, *place, *_given(options, "master_ip", "master_port")]
        if not _is_emulated(options):
            return [*words, "--world_size", str(one.setup.world_size)]
        name = options.name if (options.parallel or 1) == 1 else f"{options.name[:20]}_{runs.index(one)}"
        links = _given(options, "hosts", "rate", "delay", "offload", "show")
        return [*OURS, "cluster", "run", *links, "--name", name, "--", *words]

    # Of the ranks of one run, rank 0's host has the record.
    how = {"is_shown": True, "needs_all": True, "has_record": not options.local_rank}
    with many_runs.made(options, path, runs, open_folder, many_runs.remarks(options), command_of, **how):
        print()
    return [path / one.place for one in runs]


def _is_emulated(options: argparse.Namespace) -> bool:
    return options.local_rank is None and not options.loopback


def _ranks(options: argparse.Namespace) -> int:
    """How many ranks a run will have. Raises UsageError if the flags do not give it."""
    if options.local_rank is not None and options.world_size is None:
        raise UsageError(f"--local_rank {options.local_rank} needs --world_size. Give the number of ranks.")
    if _is_emulated(options) and options.world_size not in (None, options.hosts):
        raise UsageError(
            f"--world_size {options.world_size} is not for emulated hosts, which have one rank each. Give --hosts N."
        )
    return options.world_size or options.hosts


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    """The arguments for those of these flags that were given, or have a default."""
    values = {name: getattr(options, name) for name in names}
    return to_words({name: value for name, value in values.items() if value not in (None, False)})


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(
            f"--batch_sizes has {word!r}, which is not a whole number. Give numbers separated by commas, such as "
            f"{BATCH_SIZES}."
        ) from None
