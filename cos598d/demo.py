"""The four lessons one after the other, each in processes of its own, and the floor to measure them against."""

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from cos598d.errors import UserError
from cos598d.measure.record import claim_folder
from cos598d.start import own_python_path

# label, sync, and whether it runs on all ranks
LESSONS = (
    ("task1", "none", False),
    ("task2a", "gather_scatter", True),
    ("task2b", "all_reduce", True),
    ("task3", "ddp", True),
    ("floor", "none", True),
)


def run_demo(runs_dir: Path | None, world_size: int, words: Sequence[str]) -> list[Path]:
    """Run every lesson with the flags `words` and return the folders of their records.

    Raises UserError when one fails; it has said why by then.
    """
    if runs_dir is None:
        runs_dir = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    claim_folder(runs_dir, overwrite=False)
    folders = []
    for place, (label, sync, on_all_ranks) in enumerate(LESSONS, start=1):
        ranks = world_size if on_all_ranks else 1
        print(f"\n[{place}/{len(LESSONS)}] {label}: sync {sync} on {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
        folders.append(runs_dir / label)
        done = subprocess.run(
            [sys.executable, "-m", "cos598d", "train", *words]
            + ["--label", label, "--sync", sync, "--world_size", str(ranks), "--do_train", "--no_save_model"]
            + ["--output_dir", str(folders[-1])],
            env=os.environ | {"PYTHONPATH": own_python_path()},
            check=False,
        )
        if done.returncode:
            raise UserError(f"{label} ended with exit code {done.returncode}; its own words stand above.")
    print()
    return folders
