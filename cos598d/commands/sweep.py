"""`cos598d sweep`: many runs from one command, then one table. The same command continues what is not finished."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cos598d.commands import train
from cos598d.commands.flags import Parser, after, check_at_least_one
from cos598d.commands.run_flags import RankFlags, run_values, to_words
from cos598d.errors import UsageError
from cos598d.terminal.fields import flags_of
from cos598d.terminal.printable import printable
from cos598d.terminal.program import as_typed
from cos598d.terminal.signals import GOES_ON, AskedToEnd
from cos598d.tools.sweeps.plan import SET_HERE, Planned, check_launch, command, plan, presets, read_grid
from cos598d.tools.sweeps.results import forecast_words, results_words
from cos598d.tools.sweeps.runner import Runner

EPILOG = (
    "Write the flags of train that all runs share after --. An axis of --grid is such a flag without its dashes. "
    "Four more axes are batch (examples per rank), setup (HOSTSxRANKS), delay and rate (of the links between hosts). "
    "Setup 1x4 is four ranks here. Setup 2x2 is two ranks on each of two emulated hosts, which need root."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`; the arguments after -- become `program`."""
    assert isinstance(parser, Parser)
    parser.ends_at_dashes("program")
    parser.epilog = EPILOG
    about = " ".join(f"{one['about'].capitalize()} ({name})." for name, one in presets().items())
    parser.add_argument("preset", nargs="?", choices=[*presets()], metavar="PRESET", help=about)
    parser.add_argument("--grid", action="append", default=[], metavar="AXIS=V,...", help="an axis; may be repeated")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="run all with N seeds, from --seed upwards")
    add_sweep_options(parser)
    parser.add_argument(
        "--launch",
        metavar="TEMPLATE",
        help="command that starts a run's ranks, such as 'mpirun -np {world_size} {command}'; {hosts}, "
        "{ranks_per_host}, {rate} and {delay} are also filled in",
    )
    parser.add_argument("--only", type=int, metavar="N", help="make only the N-th run, as --dry_run numbers them")


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `demo` has too."""
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="run all N times, each in another order")
    parser.add_argument("--parallel", type=int, default=1, metavar="K", help="runs at a time (default: 1)")
    words = "folder for the runs; in an earlier call's folder, make only what is missing (default: a new one in runs/)"
    parser.add_argument("--runs_dir", type=Path, metavar="FOLDER", help=words)
    parser.add_argument("--dry_run", action="store_true", help="start nothing; print each run's iterations and bytes")


def run(options: argparse.Namespace) -> int:
    """Make what is not finished, print the table, and return 0, 1 if a run failed, or 75 if one can go on."""
    check_at_least_one("--seeds", options.seeds)
    if options.launch is not None:
        check_launch(options.launch)
    flags, world_size = _shared_flags(options.program)
    preset = presets().get(options.preset, {})
    runs = plan(preset, read_grid(options.grid), flags, options.seeds, options.repeats, world_size)
    if options.only is not None and not 1 <= options.only <= len(runs):
        raise UsageError(f"--only {options.only}: the sweep has the runs 1 to {len(runs)}. Give one of them.")
    return make(options, runs, options.preset or "sweep", preset.get("table") == "compare")


def make(options: argparse.Namespace, runs: Sequence[Planned], name: str, compares: bool) -> int:
    """Make the planned runs, and print their table."""
    for flag in ("repeats", "parallel"):
        check_at_least_one(f"--{flag}", getattr(options, flag))
    if options.dry_run:
        print(forecast_words(runs))
        return 0
    folder = options.runs_dir or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    words = [*sys.argv[1:]]
    place = words.index("--") if "--" in words else len(words)
    words[place:place] = [] if options.runs_dir else ["--runs_dir", str(folder)]
    again = printable(f"to continue there: {as_typed()} {shlex.join(words)}")
    print(f"runs: {folder} ({again})", flush=True)

    def command_of(one: Planned) -> list[str]:
        own = {"output_dir": str((folder / one.name).resolve()), "resume": "auto"}
        cluster_name = f"sweep{os.getpid()}x{runs.index(one)}"
        return command(one, to_words({**one.flags, **own}), getattr(options, "launch", None), cluster_name)

    only = getattr(options, "only", None)
    mine = runs if only is None else [runs[only - 1]]
    try:
        codes = Runner(folder, options.parallel, command_of).make(mine)
    except (KeyboardInterrupt, AskedToEnd):
        print(f"\n{again}", flush=True)
        raise
    _print_table(runs, folder, compares)
    failed = [code for code in codes.values() if code]
    return 0 if not failed else GOES_ON if all(code == GOES_ON for code in failed) else 1


def _print_table(runs: Sequence[Planned], folder: Path, compares: bool) -> None:
    for one in runs:
        if one.refused:
            print(printable(f"{one.name} is left out: {one.refused}"))
    done = [folder / one.name for one in runs if (folder / one.name / "summary.json").exists()]
    if compares and done:
        from cos598d.tools.report.records import load_run, own_names
        from cos598d.tools.report.tables import brief

        print(f"\n{brief([load_run(*place) for place in zip(done, own_names(done), strict=True)])}")
    elif table := results_words(runs, folder):
        print(f"\n{table}")
    if done:
        print(f"\npage: {as_typed()} report {shlex.quote(str(folder))}")


def _shared_flags(words: Sequence[str]) -> tuple[Mapping[str, Any], int]:
    """The values of the flags of `train FLAGS`, and --world_size, which a preset's set-ups use."""
    parser = Parser(prog="sweep -- train")
    train.add_options(parser)
    given = parser.parse_args(after(words, "train"))
    for name in (*flags_of(RankFlags), *SET_HERE, "config", "dry_run"):
        if name != "world_size" and getattr(given, name, None):
            raise UsageError(f"--{name} after --: the sweep sets it itself. Leave it out.")
    return run_values(given), given.world_size or 4
