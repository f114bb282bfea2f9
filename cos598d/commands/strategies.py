"""`python -m cos598d strategies`: one process, and every strategy on as many ranks, at equal total batch: one table.

Each runs in processes of its own, one after the other. Started again with the same flags and folder, what is finished
is not run again, and what failed or was broken off is.
"""

import argparse
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from cos598d.commands.run_flags import add_run_options, run_values, to_words
from cos598d.config import SYNC_FIELDS, RunConfig, config_from
from cos598d.errors import UsageError, UserError
from cos598d.fields import flags_of
from cos598d.files import read_json, write_json, write_whole
from cos598d.measure.claim import claim_folder
from cos598d.program import own_environment
from cos598d.report.load import load_run_as
from cos598d.report.repeats import PLACES
from cos598d.report.strategies import BASELINE, TABLE_NOTE, Entry, cautions, learning_rows, strategies_rows
from cos598d.strategies import class_of
from cos598d.tables import as_text
from cos598d.terminal.printable import printable
from cos598d.world.identity import Identity

WORLD_SIZE = 4
DEFAULT = (
    f"{BASELINE},dp,ddp,torch_fsdp,deepspeed:zero_stage=0,deepspeed:zero_stage=1,deepspeed:zero_stage=2,"
    "deepspeed:zero_stage=3,horovod,fabric,zero1,zero2,zero3"
)
ONE_PROCESS = (BASELINE, "dp")
# Flags of a run that the table sets, or that would make its runs other work.
NOT_HERE = frozenset(
    ("label", "per_gpu_train_batch_size", "output_dir", "overwrite_output_dir", "save_model", "num_train_epochs")
    + ("local_rank", "master_ip", "master_port", "secret", "silence_seconds", "max_steps", "do_train", "do_eval")
    + ("sync", *SYNC_FIELDS)
)
STATE, PAGE = "strategies.json", "report.html"
BROKEN_OFF = "was broken off"


@dataclass(frozen=True)
class Plan:
    """One run of the table: its place in the folder, its ranks, and the flags that are its own."""

    label: str
    ranks: int
    epochs: float
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Its folder's name, and its own in the table's state."""
        return f"{self.label}-e{self.epochs:g}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and those of a run, to `parser`."""
    parser.add_argument(
        "--runs_dir",
        type=Path,
        metavar="FOLDER",
        help="folder for the records and the page; an earlier call's: go on there (default: a new one in runs/)",
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
    values = run_values(options)
    Identity(0, options.world_size)  # for its checks
    config_from(values).check(options.world_size)
    epochs = [_number(word) for word in options.epochs.split(",")]
    names = list(dict.fromkeys(word.strip() for word in options.strategies.split(",") if word.strip()))
    if not names:
        raise UsageError(f"--strategies {options.strategies!r} names none: give one or more, separated by commas.")
    left_out, plans = [], []
    for name in names:
        ranks = 1 if name in ONE_PROCESS else options.world_size
        own = _own_values(name)
        try:
            _check(name, values | own, ranks)
            plans += [Plan(name.replace(":", "-"), ranks, one, own | {"num_train_epochs": one}) for one in epochs]
        except UserError as error:
            left_out.append(f"{name} is left out: {error}")
    plans.sort(key=lambda plan: epochs.index(plan.epochs))
    for sentence in left_out:
        print(printable(sentence), flush=True)
    if not plans:
        raise UserError("no strategy is left to run.")
    folder = options.runs_dir or Path("runs") / f"strategies-{datetime.now():%Y%m%d-%H%M%S}"
    with claim_folder(folder, overwrite=True):
        entries = [_entry(folder, plan, values, f"[{place}/{len(plans)}]") for place, plan in enumerate(plans, start=1)]
        remarks = cautions(entries)
        table = as_text(strategies_rows(entries), numbers=True)
        parts = [*map(printable, remarks), table, textwrap.fill(TABLE_NOTE, 118), *map(printable, left_out)]
        print("", "\n\n".join(parts), "", sep="\n")
        _write_page(folder, entries, remarks, left_out)
    return int(any(entry.run is None for entry in entries))


def _own_values(name: str) -> dict[str, Any]:
    """The flags that a word of --strategies stands for. Raises UsageError for a name or an option that there is not."""
    if name == BASELINE:
        return {"sync": "none"}
    sync, *settings = name.split(":")
    class_of(sync)
    known, values = flags_of(RunConfig), dict[str, Any](sync=sync)
    for setting in settings:
        option, _, text = setting.partition("=")
        if option not in SYNC_FIELDS:
            raise UsageError(
                f"--strategies {name}: there is no option {option!r}; the known ones are {', '.join(SYNC_FIELDS)}."
            )
        kind = known[option].kind
        try:
            values[option] = not known[option].default if kind is bool else kind(text)
        except ValueError:
            raise UsageError(f"--strategies {name}: {option} needs a number, not {text!r}.") from None
    return values


def _check(name: str, values: Mapping[str, Any], ranks: int) -> None:
    """Raise UserError where this strategy cannot run here."""
    if name == "dp" and (values.get("no_cuda") or torch.cuda.device_count() < 2):
        raise UserError("with fewer than two GPUs DataParallel only calls the module, which measures nothing.")
    config_from(values).check(ranks)


def _number(word: str) -> float:
    try:
        epochs = float(word)
    except ValueError:
        epochs = 0.0
    if not 0 < epochs < 1e6:
        raise UsageError(f"--epochs {word}: give numbers above 0, separated by commas.")
    return epochs


def _entry(folder: Path, plan: Plan, values: Mapping[str, Any], place: str) -> Entry:
    """The plan's run, made now if it is not finished; or why it failed."""
    entry = Entry(plan.label, plan.ranks, plan.epochs)
    output, state = folder / plan.place, _state(folder)
    head = f"\n{place} {plan.label}: {plan.ranks} rank{'s' if plan.ranks > 1 else ''}, {plan.epochs:g} epochs"
    if (output / "summary.json").exists():
        try:
            finished = load_run_as(output, plan.place)
            _same_flags(finished.config, plan, values, output)
            print(f"{head}: finished before, not run again", flush=True)
            return replace(entry, run=finished)
        except UsageError:
            raise
        except UserError as error:
            print(f"{head}: run again, since {error}", flush=True)
    elif plan.place in state:
        print(f"{head}: run again, since it {state[plan.place]}", flush=True)
    else:
        print(head, flush=True)
    _say(folder, plan, BROKEN_OFF)
    words = to_words({**values, **plan.values, "label": plan.label})
    words += ["--world_size", str(plan.ranks), "--no_save_model", "--output_dir", str(output), "--overwrite_output_dir"]
    code, last = _train(words)
    if code:
        said = f"failed with exit code {code}: {last or 'it said nothing'}"
        _say(folder, plan, said)
        return replace(entry, said=said)
    _say(folder, plan, None)
    return replace(entry, run=load_run_as(output, plan.place))


def _same_flags(found: Mapping[str, Any], plan: Plan, values: Mapping[str, Any], output: Path) -> None:
    """Raise UsageError where a finished run had other flags than it would be given now."""
    asked = asdict(config_from({**values, **plan.values, "label": plan.label}))
    asked |= {"world_size": plan.ranks, "save_model": False}
    for name, value in asked.items():
        if name not in PLACES and name in found and found[name] != value:
            raise UsageError(
                f"{output} is a finished run with {name} {printable(found[name], 60)}, and {value} is asked for now: "
                "give the same flags again, or another --runs_dir."
            )


def _train(words: Sequence[str]) -> tuple[int, str]:
    """Start a run and wait for it: its exit code, and the last line of what it said of errors, which is passed on."""
    command = [sys.executable, "-m", "cos598d", "train", *words]
    last = ""
    with subprocess.Popen(command, env=own_environment(), stderr=subprocess.PIPE, text=True, errors="replace") as one:
        assert one.stderr is not None
        for line in one.stderr:
            print(printable(line.rstrip()), file=sys.stderr, flush=True)
            last = printable(line.strip()) or last
    return one.returncode, last


def _state(folder: Path) -> dict[str, str]:
    """What there is to say of runs that did not end well, by their places."""
    try:
        found = read_json(folder / STATE)
    except (OSError, ValueError):
        return {}
    return {str(name): printable(said, 300) for name, said in found.items()} if isinstance(found, dict) else {}


def _say(folder: Path, plan: Plan, said: str | None) -> None:
    state = _state(folder)
    state.pop(plan.place, None)
    write_json(folder / STATE, state | ({plan.place: said} if said else {}))


def _write_page(folder: Path, entries: Sequence[Entry], remarks: Sequence[str], left_out: Sequence[str]) -> None:
    """Write the page of all runs, which begins with the table."""
    from cos598d.report.render import as_html, need

    runs = [entry.run for entry in entries if entry.run]
    if not runs:
        return
    need("jinja2", "matplotlib")
    from cos598d.report.blocks import Block, Section, Table
    from cos598d.report.page import build_page

    page = build_page(runs)
    tables: list[Block] = [
        Table(TABLE_NOTE, strategies_rows(entries)),
        *left_out,
        Table("Losses and metrics after each epoch.", learning_rows(entries)),
    ]
    answer = replace(page.answer, cautions=list(dict.fromkeys([*remarks, *page.answer.cautions])))
    sections = [Section("The strategies at equal total batch", tables), *page.sections]
    write_whole(folder / PAGE, as_html(replace(page, answer=answer, sections=sections)))
    print(f"page: {folder / PAGE}")
