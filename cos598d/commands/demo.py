"""`cos598d demo`: the four lessons one after the other, and the floor to measure them against.

Each in processes of its own; once, or several times in another order each: what slows the machine for a while then
meets all of them alike.
"""

import argparse
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from cos598d.checkpoint_flags import GROUP as LIFE
from cos598d.commands.flags import check_at_least_one
from cos598d.commands.run_flags import add_run_options, run_values, to_words
from cos598d.config import config_from
from cos598d.errors import UserError
from cos598d.measure.claim import claim_folder
from cos598d.terminal.program import own_environment
from cos598d.terminal.words import number_of
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import brief, comparison
from cos598d.world.identity import Identity

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
# Flags of a run that the lessons set, or that mean nothing to them.
NOT_HERE = frozenset(
    ("sync", "label", "per_gpu_train_batch_size", "output_dir", "overwrite_output_dir", "save_model")
    + ("local_rank", "master_ip", "master_port", "secret", "silence_seconds")
    + ("do_train", "do_eval", "check_replicas", "max_restarts", LIFE)
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and those of a run, to `parser`."""
    parser.add_argument(
        "--runs_dir", type=Path, metavar="FOLDER", help="folder for the runs (default: a new one in runs/)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="run all of them N times, in another order each: exposed seconds then have an interval (default: 1)",
    )
    parser.add_argument("--verbose", action="store_true", help="print every table of compare instead of one")
    add_run_options(parser, but=NOT_HERE, world_size=WORLD_SIZE, **DEFAULTS)
    parser.set_defaults(world_size=WORLD_SIZE)


def run(options: argparse.Namespace) -> int:
    """Run the lessons, print one table and the answers, and return 0. Raises UserError where one fails."""
    values = run_values(options)
    defaults = {n: v for n, v in DEFAULTS.items() if n != "max_steps"} if "num_train_epochs" in values else DEFAULTS
    values = defaults | values
    check_at_least_one("--repeats", options.repeats)
    Identity(0, options.world_size)  # for its checks
    config_from(values).check(options.world_size)
    runs = run_demo(options.runs_dir, options.world_size, to_words(values), options.repeats)
    found = [load_run(folder) for folder in runs]
    print(comparison(found) if options.verbose else brief(found))
    if not options.verbose:
        print(f"\nAll tables: cos598d compare {shlex.join(map(str, runs))}")
    return 0


def run_demo(runs_dir: Path | None, world_size: int, words: Sequence[str], repeats: int = 1) -> list[Path]:
    """Run every lesson with the flags `words`, `repeats` times, and return the folders of their records.

    They are in the lessons' order, one repeat after the other, whatever the order in which they ran.
    Raises UserError when one fails; it has said why by then.
    """
    if runs_dir is None:
        runs_dir = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    with claim_folder(runs_dir, overwrite=False, flag="--runs_dir"):
        _run_all(runs_dir, world_size, words, repeats)
    return [_folder(runs_dir, label, repeat, repeats) for repeat in range(repeats) for label, *_ in LESSONS]


def _run_all(runs_dir: Path, world_size: int, words: Sequence[str], repeats: int) -> None:
    turns = [(repeat, lesson) for repeat in range(repeats) for lesson in lessons_of(repeat)]
    for place, (repeat, (label, sync, on_all_ranks)) in enumerate(turns, start=1):
        ranks = world_size if on_all_ranks else 1
        which = f", repeat {repeat + 1} of {repeats}" if repeats > 1 else ""
        head = f"\n[{place}/{len(turns)}] {label}: sync {sync} on {number_of(ranks, 'rank')}{which}"
        print(head, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "cos598d", "train", *words]
            + ["--label", label, "--sync", sync, "--world_size", str(ranks), "--do_train", "--no_save_model"]
            + ["--output_dir", str(_folder(runs_dir, label, repeat, repeats))],
            env=own_environment(),
            check=False,
        )
        if done.returncode:
            raise UserError(f"{label} failed with exit code {done.returncode}. See its error above.")
    print()


def lessons_of(repeat: int) -> list[tuple[str, str, bool]]:
    """The lessons in the order in which this repeat runs them: as they are, then shuffled, the same every time."""
    lessons = list(LESSONS)
    if repeat:
        random.Random(repeat).shuffle(lessons)
    return lessons


def _folder(runs_dir: Path, label: str, repeat: int, repeats: int) -> Path:
    return runs_dir / f"repeat{repeat + 1}" / label if repeats > 1 else runs_dir / label
