"""Do the lessons agree? Trains each on 1, 2 and 4 ranks and compares losses and final weights with task 1's.

    GLUE_DIR=... python benchmarks/parity.py --runs_dir runs/parity [--max_steps 40] [any other flag of a run]
    SQUAD_DIR=... python benchmarks/parity.py --runs_dir runs/parity --script run_squad.py --max_steps 20

A run that stands in the folder already is not made again. About 20 minutes on 2 cores at 40 iterations of RTE.
"""

import argparse
import subprocess
import sys
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from cos598d.report.table import load_run

LESSONS = ("task2a", "task2b", "task3")
# Softmax over the keys does not change when all scores of a query shift alike, so the true gradient of a key's bias
# is zero: what Adam sees there is rounding noise, which it scales up to whole steps.
KEY_BIAS = "attention.self.key.bias"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--script", choices=("run_glue.py", "run_squad.py"), default="run_glue.py")
    options, flags = parser.parse_known_args()
    if not any(flag.startswith("--max_steps") for flag in flags):
        flags += ["--max_steps", "40"]
    alone = make_run(options.runs_dir / "task1", f"task1/{options.script}", 1, flags)
    print("run           losses, to task 1   among equal n   weights, to task 1   key biases apart")
    for world_size in options.world_sizes:
        runs = {
            lesson: make_run(
                options.runs_dir / f"{lesson}-n{world_size}", f"{lesson}/{options.script}", world_size, flags
            )
            for lesson in LESSONS
        }
        among = max(loss_difference(runs[a], runs[b]) for a, b in combinations(LESSONS, 2))
        for lesson, folder in runs.items():
            everywhere, apart = weight_differences(folder, alone)
            print(
                f"{lesson} n={world_size}    {loss_difference(folder, alone):.1e}             {among:.1e}"
                f"         {everywhere:.1e}              {apart:.1e}",
                flush=True,
            )


def make_run(folder: Path, script: str, world_size: int, flags: list[str]) -> Path:
    """The folder of the run, made if it is not there yet."""
    if not (folder / "summary.json").exists():
        ranks = [] if world_size == 1 else ["--world_size", str(world_size)]
        subprocess.run(
            [sys.executable, str(ROOT / script), "--do_train", "--output_dir", str(folder), *ranks, *flags],
            check=True,
            stdout=sys.stderr,
        )
    return folder


def loss_difference(first: Path, second: Path) -> float:
    """The largest difference of two runs' losses at any iteration."""
    return max(abs(a - b) for a, b in zip(load_run(first)["losses"], load_run(second)["losses"], strict=True))


def weight_differences(first: Path, second: Path) -> tuple[float, float]:
    """The largest difference of two runs' final weights: over all, and without the key biases."""
    a, b = (torch.load(folder / "model" / "pytorch_model.bin", weights_only=True) for folder in (first, second))
    found = {name: (a[name] - b[name]).abs().max().item() for name in a}
    return max(found.values()), max(value for name, value in found.items() if not name.endswith(KEY_BIAS))


if __name__ == "__main__":
    main()
