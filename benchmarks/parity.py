"""Do the lessons agree? Trains each on 1, 2 and 4 ranks and compares losses and final weights with task 1's.

    GLUE_DIR=... python benchmarks/parity.py --runs_dir runs/parity [--max_steps 40] [any other flag of a run]
    SQUAD_DIR=... python benchmarks/parity.py --runs_dir runs/parity --script run_squad.py --max_steps 20

Three times: by AdamW with clipping, as BERT is fine-tuned, and by SGD without and with momentum and nothing clipped.
AdamW's step, like a clipped one, hardly depends on the gradient's scale, so a sum would pass there for an average; SGD
tells them apart if its weights move: how far they do stands beside. A run that stands in the folder already is not made
again. About 20 minutes on 2 cores for each optimizer at 40 iterations of RTE.
"""

import argparse
import subprocess
import sys
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from cos598d.tools.report.load import load_run

LESSONS = ("task2a", "task2b", "task3")
# What each makes of the flags of a run, and how its folders' names end.
OPTIMIZERS = {
    "adamw": (["--optimizer", "adamw"], ""),
    "sgd": (["--optimizer", "sgd", "--learning_rate", "0.05", "--max_grad_norm", "0"], "-sgd"),
    "momentum": (
        ["--optimizer", "sgd", "--momentum", "0.9", "--learning_rate", "0.005", "--max_grad_norm", "0"],
        "-momentum",
    ),
}
# Softmax over the keys does not change when all scores of a query shift alike, so the true gradient of a key's bias
# is zero: what Adam sees there is rounding noise, which it scales up to whole steps.
KEY_BIASES = ("attention.self.key.bias", "attention.attention.key.bias")  # BERT's, and those of the vision transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--optimizers", choices=OPTIMIZERS, nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--script", choices=("run_glue.py", "run_squad.py"), default="run_glue.py")
    options, flags = parser.parse_known_args()
    if not any(flag.startswith("--max_steps") for flag in flags):
        flags += ["--max_steps", "40"]
    # One step at a rate of 0 leaves the weights that all runs start from.
    first = ["--max_steps", "1", "--learning_rate", "0", "--weight_decay", "0"]
    start = make_run(options.runs_dir / "start", f"task1/{options.script}", 1, [*flags, *first])
    for name in options.optimizers:
        own, ending = OPTIMIZERS[name]
        compare(options, start, name, [*own, *flags], ending)


def compare(options: argparse.Namespace, start: Path, name: str, flags: list[str], ending: str) -> None:
    """Make the runs of one optimizer and print their differences."""

    def run(lesson: str, world_size: int) -> Path:
        ranks = "" if lesson == "task1" else f"-n{world_size}"
        return make_run(options.runs_dir / f"{lesson}{ranks}{ending}", f"{lesson}/{options.script}", world_size, flags)

    alone = run("task1", 1)
    losses = load_run(alone)["losses"]
    moved, _ = weight_differences(alone, start)
    print(f"{name}: task 1's loss goes from {losses[0]:.4f} to {losses[-1]:.4f}, its weights move by up to {moved:.1e}")
    print("run           losses, to task 1   among equal n   weights, to task 1   key biases apart", flush=True)
    for world_size in options.world_sizes:
        runs = {lesson: run(lesson, world_size) for lesson in LESSONS}
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
    return max(found.values()), max(value for name, value in found.items() if not name.endswith(KEY_BIASES))


if __name__ == "__main__":
    main()
