"""The four lessons one after the other, each in processes of its own, and the floor to measure them against.

Once, or several times in another order each: what slows the machine for a while then meets all of them alike.
"""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from cos598d.errors import UserError
from cos598d.measure.record import claim_folder
from cos598d.program import own_python_path

# label, sync, and whether it runs on all ranks
LESSONS = (
    ("task1", "none", False),
    ("task2a", "gather_scatter", True),
    ("task2b", "all_reduce", True),
    ("task3", "ddp", True),
    ("floor", "none", True),
)


def run_demo(runs_dir: Path | None, world_size: int, words: Sequence[str], repeats: int = 1) -> list[Path]:
    """Run every lesson with the flags `words`, `repeats` times, and return the folders of their records.

    They are in the lessons' order, one repeat after the other, whatever the order in which they ran.
    Raises UserError when one fails; it has said why by then.
    """
    if runs_dir is None:
        runs_dir = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    with claim_folder(runs_dir, overwrite=False):
        _run_all(runs_dir, world_size, words, repeats)
    return [_folder(runs_dir, label, repeat, repeats) for repeat in range(repeats) for label, *_ in LESSONS]


def _run_all(runs_dir: Path, world_size: int, words: Sequence[str], repeats: int) -> None:
    turns = [(repeat, lesson) for repeat in range(repeats) for lesson in lessons_of(repeat)]
    for place, (repeat, (label, sync, on_all_ranks)) in enumerate(turns, start=1):
        ranks = world_size if on_all_ranks else 1
        which = f", repeat {repeat + 1} of {repeats}" if repeats > 1 else ""
        head = f"\n[{place}/{len(turns)}] {label}: sync {sync} on {ranks} rank{'s' if ranks > 1 else ''}{which}"
        print(head, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "cos598d", "train", *words]
            + ["--label", label, "--sync", sync, "--world_size", str(ranks), "--do_train", "--no_save_model"]
            + ["--output_dir", str(_folder(runs_dir, label, repeat, repeats))],
            env=os.environ | {"PYTHONPATH": own_python_path()},
            check=False,
        )
        if done.returncode:
            raise UserError(f"{label} ended with exit code {done.returncode}; its own words stand above.")
    print()


def lessons_of(repeat: int) -> list[tuple[str, str, bool]]:
    """The lessons in the order in which this repeat runs them: as they are, then shuffled, the same every time."""
    lessons = list(LESSONS)
    if repeat:
        random.Random(repeat).shuffle(lessons)
    return lessons


def _folder(runs_dir: Path, label: str, repeat: int, repeats: int) -> Path:
    return runs_dir / f"repeat{repeat + 1}" / label if repeats > 1 else runs_dir / label
