"""`cos598d strategies`: one process, then every strategy on the same ranks with the same total batch; one table.

Each runs in processes of its own, one after the other. The same command with the same folder runs only what is not
finished, has failed or was stopped.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cos598d.commands import many_runs
from cos598d.commands.run_flags import add_run_options, run_values
from cos598d.config import SYNC_FIELDS, config_from
from cos598d.errors import WARNING, UsageError, UserError, flag_called
from cos598d.sync import get_sync
from cos598d.terminal.words import number_of
from cos598d.tools.bench.candidates import read_candidate
from cos598d.tools.report.blocks import Table, need
from cos598d.tools.report.strategies import (
    ALL_GPUS,
    BASELINE,
    BRIEF_NOTE,
    TABLE_NOTE,
    brief_rows,
    cautions,
    left_out,
    strategies_page,
    strategies_rows,
)
from cos598d.tools.runs.folders import ONE_PROCESS, StrategiesFolder
from cos598d.tools.runs.plan import PlannedRun, Setup
from cos598d.tools.runs.results import show

WORLD_SIZE = 4
DEFAULT = (
    f"{BASELINE},{ALL_GPUS},ddp,torch_fsdp,deepspeed:zero_stage=0,deepspeed:zero_stage=1,deepspeed:zero_stage=2,"
    "deepspeed:zero_stage=3,horovod,fabric,zero1,zero2,zero3"
)
# Flags of a run that the table sets, or that would make its runs different workloads.
NOT_HERE = many_runs.SET_HERE | many_runs.OF_RANKS | {"num_train_epochs", "max_steps", "sync", *SYNC_FIELDS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and those of a run, to `parser`."""
    many_runs.add_flags(parser)
    parser.add_argument("--epochs", default="2", metavar="E,...", help="train each for this many epochs (default: 2)")
    parser.add_argument(
        "--strategies",
        default=DEFAULT,
        metavar="NAME,...",
        help=f"{BASELINE} (one process), or what --sync takes, with options as NAME:option=value (default: "
        f"{DEFAULT.replace(',', ', ')})",
    )
    add_run_options(parser, but=NOT_HERE, world_size=WORLD_SIZE)
    parser.set_defaults(world_size=WORLD_SIZE)


def run(options: argparse.Namespace) -> int:
    """Run what is not finished, print the table, write the page, and return 0, or 1 if a strategy failed."""
    values = run_values(options)
    many_runs.check(options, values)
    epochs = list(dict.fromkeys(_number(word) for word in options.epochs.split(",")))
    runs = _planned(options.strategies, epochs, values, options.world_size)
    refused = dict.fromkeys(f"{one.label} is left out: {one.refused}" for one in runs if one.refused)
    before = [*refused, *many_runs.remarks(options)]
    if options.dry_run:
        return many_runs.print_forecast(options, runs, before)
    need("jinja2", "matplotlib")  # now, and not when hours have been spent
    path = many_runs.folder_of(options, "strategies")

    def open_folder(path: Path) -> StrategiesFolder:
        folder = StrategiesFolder(path)
        folder.check_flags(runs, values, options.world_size)
        if folder.damage:
            print(f"{WARNING}how earlier runs in this folder ended is unknown: {folder.damage}", flush=True)
        return folder

    with many_runs.made(options, path, runs, open_folder, before, is_shown=True) as (folder, unfinished):
        entries = folder.entries()
        page = strategies_page(entries) if any(entry.run for entry in entries) else None
        brief, whole = Table(BRIEF_NOTE, brief_rows(entries)), Table(TABLE_NOTE, strategies_rows(entries))
        show(path, cautions(entries), page.answer.sentences if page else [], brief, whole, left_out(entries), page)
    return int(unfinished > 0)


def _planned(words: str, epochs: Sequence[float], values: Mapping[str, Any], world_size: int) -> list[PlannedRun]:
    """The runs that --strategies names, for each number of epochs; with those that cannot run here, and why.

    Raises UsageError for an unknown name or option, and UserError if nothing can run.
    """
    names = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not names:
        raise UsageError(f"--strategies {words!r} has no name. Give one or more, separated by commas.")
    found: dict[str, tuple[int, dict[str, Any], str]] = {}
    for name in names:
        with flag_called("--strategies", "--sync"):
            sync, options = ("none", {}) if name == BASELINE else read_candidate(name)
        get_sync(sync)  # which must be there
        label = re.sub(r"[^\w.+=@-]", "-", name).lstrip("-.")
        if label in found:
            raise UsageError(f"--strategies {name} would use another one's folder, {label}. Leave one of them out.")
        ranks = 1 if label in ONE_PROCESS else world_size
        own = {**values, "sync": sync, **options}
        found[label] = ranks, own, _refusal(sync, own, ranks)
    if all(refused for *_, refused in found.values()):
        why = " ".join(dict.fromkeys(f"{label}: {refused}" for label, (*_, refused) in found.items()))
        raise UserError(f"--strategies {words}: none of these can run here. {why} Choose others.")
    return [
        PlannedRun(
            place=f"{label}-e{one:g}",
            label=label,
            name=f"{label}-e{one:g}",
            head=f"{label}: {number_of(ranks, 'rank')}, {one:g} epochs",
            setup=Setup(1, ranks),
            values={**own, "num_train_epochs": one, "save_epochs": 0},
            refused=refused,
        )
        for one in epochs
        for label, (ranks, own, refused) in found.items()
    ]


def _refusal(sync: str, values: Mapping[str, Any], ranks: int) -> str:
    """Why a strategy cannot run here; "" if it can."""
    if sync == ALL_GPUS and (values.get("no_cuda") or torch.cuda.device_count() < 2):
        return "DataParallel needs two GPUs; with fewer it only calls the module, so there is nothing to measure."
    try:
        config_from(values).check(ranks)
    except UserError as error:
        return str(error)
    return ""


def _number(word: str) -> float:
    try:
        epochs = float(word)
    except ValueError:
        epochs = 0.0
    if not 0 < epochs < 1e6:
        raise UsageError(f"--epochs {word} is not valid. Give numbers above 0, separated by commas.")
    return epochs
