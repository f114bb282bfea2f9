"""`cos598d demo`: the four tasks one after the other, and a fifth run without communication as their baseline.

Each runs in processes of its own: once, or several times, each time in another order. Then whatever slows the machine
for a while affects all of them alike. The same command with the same folder runs only what is not finished.
"""

import argparse
import random
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from cos598d.commands import many_runs
from cos598d.commands.flags import check_at_least_one
from cos598d.commands.run_flags import add_run_options, run_values
from cos598d.terminal.words import number_of
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import brief, comparison
from cos598d.tools.runs.folder import AskedFolder
from cos598d.tools.runs.plan import PlannedRun, Setup

# label, sync, and whether it runs on all ranks
LESSONS = (
    ("task1", "none", False),
    ("task2a", "gather_scatter", True),
    ("task2b", "all_reduce", True),
    ("task3", "ddp", True),
    ("floor", "none", True),
)
WORLD_SIZE = 4
# It compares seconds and losses: a few steps, no evaluation, no checkpoints, no models kept.
DEFAULTS = {"max_steps": 6, "do_train": True, "save_epochs": 0}
# Flags of a run that the tasks set, or that have no effect on them.
NOT_HERE = many_runs.SET_HERE | many_runs.OF_RANKS | {"sync", "check_replicas"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and those of a run, to `parser`."""
    many_runs.add_flags(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="run everything N times, each time in another order; then exposed seconds have a 95 %% confidence "
        "interval (default: 1)",
    )
    parser.add_argument("--verbose", action="store_true", help="print every table of compare instead of one")
    add_run_options(parser, but=NOT_HERE, world_size=WORLD_SIZE, **DEFAULTS)
    parser.set_defaults(world_size=WORLD_SIZE)


def run(options: argparse.Namespace) -> int:
    """Run the tasks that are not finished, print one table and the answers, and return 0.

    Raises UserError if one fails, after that one has printed the reason.
    """
    values = run_values(options)
    defaults = {n: v for n, v in DEFAULTS.items() if n != "max_steps"} if "num_train_epochs" in values else DEFAULTS
    values = defaults | values
    check_at_least_one("--repeats", options.repeats)
    many_runs.check(options, values)
    runs = _planned(values, options.world_size, options.repeats)
    if options.dry_run:
        return many_runs.print_forecast(options, runs)
    path = many_runs.folder_of(options, "demo")
    asked = {"flags": values | {"world_size": options.world_size, "repeats": options.repeats}}
    open_folder = partial(AskedFolder, asked=asked, what="demo")

    before = many_runs.remarks(options)
    with many_runs.made(options, path, runs, open_folder, before, is_shown=True, needs_all=True):
        print()
    # In the tasks' order, one repeat after the other, whatever the order in which they ran.
    places = [
        path / _place(label, repeat, options.repeats) for repeat in range(options.repeats) for label, *_ in LESSONS
    ]
    found = [load_run(place) for place in places]
    print(comparison(found) if options.verbose else brief(found))
    if not options.verbose:
        print(f"\nAll tables: cos598d compare --verbose {shlex.join(map(str, places))}")
    return 0


def lessons_of(repeat: int) -> list[tuple[str, str, bool]]:
    """The lessons in the order in which this repeat runs them: as they are, then shuffled, the same every time."""
    lessons = list(LESSONS)
    if repeat:
        random.Random(repeat).shuffle(lessons)
    return lessons


def _planned(values: Mapping[str, Any], world_size: int, repeats: int) -> list[PlannedRun]:
    runs = []
    for repeat in range(repeats):
        which = f", repeat {repeat + 1} of {repeats}" if repeats > 1 else ""
        for label, sync, is_on_all_ranks in lessons_of(repeat):
            ranks = world_size if is_on_all_ranks else 1
            runs.append(
                PlannedRun(
                    place=_place(label, repeat, repeats),
                    label=label,
                    name=label,
                    head=f"{label}: sync {sync} on {number_of(ranks, 'rank')}{which}",
                    setup=Setup(1, ranks),
                    values={**values, "sync": sync},
                )
            )
    return runs


def _place(label: str, repeat: int, repeats: int) -> str:
    return f"repeat{repeat + 1}/{label}" if repeats > 1 else label
