"""`cos598d strategies`: one process, and every strategy on as many ranks, at equal total batch: one table.

Each runs in processes of its own, one after the other. Started again with the same flags and folder, what is finished
is not run again, and what failed or was broken off is.
"""

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from cos598d.checkpoint_flags import GROUP as LIFE
from cos598d.commands.run_flags import add_run_options, run_values, to_words
from cos598d.commands.strategies_folder import ONE_PROCESS, PlannedRun, TableFolder
from cos598d.config import SYNC_FIELDS, config_from
from cos598d.errors import WARNING, UsageError, UserError
from cos598d.measure.claim import claim_folder
from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, LEFT_OUT
from cos598d.strategies import class_of
from cos598d.terminal.files import write_whole
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_markdown, as_text, markdown_text
from cos598d.terminal.words import number_of
from cos598d.tools.bench.candidates import read_candidate
from cos598d.tools.report.render import as_html, need
from cos598d.tools.report.strategies import (
    ALL_GPUS,
    BASELINE,
    TABLE_NOTE,
    StrategyResult,
    cautions,
    left_out,
    strategies_page,
    strategies_rows,
)
from cos598d.tools.sweep import child
from cos598d.world.identity import Identity

WORLD_SIZE = 4
DEFAULT = (
    f"{BASELINE},{ALL_GPUS},ddp,torch_fsdp,deepspeed:zero_stage=0,deepspeed:zero_stage=1,deepspeed:zero_stage=2,"
    "deepspeed:zero_stage=3,horovod,fabric,zero1,zero2,zero3"
)
# Flags of a run that the table sets, or that would make its runs other work.
NOT_HERE = frozenset(
    ("label", "per_gpu_train_batch_size", "output_dir", "overwrite_output_dir", "save_model", "num_train_epochs")
    + ("local_rank", "master_ip", "master_port", "secret", "silence_seconds", "max_steps", "do_train", "do_eval")
    + ("sync", "max_restarts", LIFE, *SYNC_FIELDS)
)
PAGE, TABLE = "report.html", "table.md"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and those of a run, to `parser`."""
    parser.add_argument(
        "--runs_dir",
        type=Path,
        metavar="FOLDER",
        help="folder for the runs and the page; that of an earlier call: continue it (default: a new one in runs/)",
    )
    parser.add_argument("--epochs", default="2", metavar="E,...", help="train for so many epochs each (default: 2)")
    parser.add_argument(
        "--strategies",
        default=DEFAULT,
        metavar="NAME,...",
        help=f"{BASELINE} (one process), and what --sync takes, with options as NAME:option=value (default: {DEFAULT})",
    )
    add_run_options(parser, but=NOT_HERE, world_size=WORLD_SIZE)
    parser.set_defaults(world_size=WORLD_SIZE)


def run(options: argparse.Namespace) -> int:
    """Run what is not finished, print the table, write the page, and return 0, or 1 where a strategy failed."""
    need("jinja2", "matplotlib")  # now, and not when hours have been spent
    values = run_values(options)
    Identity(0, options.world_size)  # for its checks
    config_from(values).check(options.world_size)
    epochs = list(dict.fromkeys(_number(word) for word in options.epochs.split(",")))
    plans = _plans(options.strategies, epochs, values, options.world_size)
    path = options.runs_dir or Path("runs") / f"strategies-{datetime.now():%Y%m%d-%H%M%S}"
    with claim_folder(path, overwrite=True, flag="--runs_dir"):
        folder = TableFolder(path)
        folder.check_flags(plans, values, options.world_size)
        if folder.damage:
            print(f"how earlier calls' runs ended is not known: {folder.damage}", flush=True)
        for sentence in dict.fromkeys(f"{plan.label} is left out: {plan.refused}" for plan in plans if plan.refused):
            print(printable(sentence), flush=True)
        print(f"output: {path} (to continue, repeat the command with --runs_dir {path})", flush=True)
        count, place, failed = sum(not plan.refused for plan in plans), 0, 0
        for plan in plans:
            if plan.refused:
                folder.note(plan.place, plan.about, LEFT_OUT, plan.refused)
                continue
            place += 1
            head = f"\n[{place}/{count}] {plan.label}: {number_of(plan.ranks, 'rank')}"
            failed += not _is_made(folder, plan, values, f"{head}, {plan.epochs:g} epochs")
        _show(path, folder.entries())
    return int(failed > 0)


def _plans(words: str, epochs: Sequence[float], values: Mapping[str, Any], world_size: int) -> list[PlannedRun]:
    """What the words of --strategies stand for, for each number of epochs; with what cannot run here, and why.

    Raises UsageError for a name or an option that there is not, and UserError where nothing can run.
    """
    names = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not names:
        raise UsageError(f"--strategies {words!r} has no name. Give one or more, separated by commas.")
    found: dict[str, PlannedRun] = {}
    for name in names:
        sync, options = ("none", {}) if name == BASELINE else read_candidate(name)
        class_of(sync)  # which there must be
        label = re.sub(r"[^\w.+=@-]", "-", name).lstrip("-.")
        if label in found:
            raise UsageError(f"--strategies {name} would use the same folder as {label}. Leave one of them out.")
        ranks = 1 if label in ONE_PROCESS else world_size
        own: dict[str, Any] = {"sync": sync, **options}
        found[label] = PlannedRun(label, ranks, 0, own, _refusal(sync, {**values, **own}, ranks))
    if all(plan.refused for plan in found.values()):
        raise UserError(f"no strategy is left to run: {' '.join(plan.refused for plan in found.values())}")
    return [
        replace(plan, epochs=one, values={**plan.values, "num_train_epochs": one})
        for one in epochs
        for plan in found.values()
    ]


def _refusal(sync: str, values: Mapping[str, Any], ranks: int) -> str:
    """Why a strategy cannot run here; "" where it can."""
    if sync == ALL_GPUS and (values.get("no_cuda") or torch.cuda.device_count() < 2):
        return "with fewer than two GPUs DataParallel only calls the module, which measures nothing."
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


def _is_made(folder: TableFolder, plan: PlannedRun, values: Mapping[str, Any], head: str) -> bool:
    """Whether the plan's run is finished: before, or now."""
    folder.check_own(plan.place)
    again = folder.said(plan.place)
    try:
        if folder.finished_run(plan):
            print(f"{head}: finished before, not run again", flush=True)
            folder.note(plan.place, plan.about, FINISHED)
            return True
    except UserError as error:
        again = str(error)
    print(f"{head}: run again, since {printable(again)}" if again else head, flush=True)
    folder.note(plan.place, plan.about, BROKEN_OFF, "it was broken off.")  # until more is known
    output = folder.path / plan.place
    words = to_words({**values, **plan.values, "label": plan.label, "save_epochs": 0})
    words += ["--world_size", str(plan.ranks), "--no_save_model", "--output_dir", str(output), "--overwrite_output_dir"]
    code, last = child.train(words)
    if code or not (output / "summary.json").exists():  # it may also have stopped on purpose before its end
        folder.note(plan.place, plan.about, FAILED, f"it failed with exit code {code}: {last or 'it said nothing.'}")
        return False
    folder.note(plan.place, plan.about, FINISHED)
    return True


def _show(path: Path, entries: Sequence[StrategyResult]) -> None:
    """Print the table; write it in Markdown, and the page of all runs, which begins with it."""
    rows, remarks, absent = strategies_rows(entries), cautions(entries), left_out(entries)
    remarks = [f"{WARNING}{remark}" for remark in remarks]
    parts = [*map(printable, remarks), as_text(rows, numbers=True), textwrap.fill(TABLE_NOTE, 118)]
    print("", "\n\n".join([*parts, *map(printable, absent)]), "", sep="\n")
    words = [*map(markdown_text, remarks), as_markdown(rows), *map(markdown_text, [TABLE_NOTE, *absent])]
    write_whole(path / TABLE, "\n\n".join(words) + "\n")
    if any(entry.run for entry in entries):
        write_whole(path / PAGE, as_html(strategies_page(entries)))
        print(f"page: {path / PAGE}")
