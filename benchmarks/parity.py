"""Do all syncs train as task 1 does? Losses of every iteration and final weights of each, compared with task 1's.

    GLUE_DIR=... python benchmarks/parity.py --runs_dir runs/parity [--max_steps 40] [any other flag of a run]
    SQUAD_DIR=... python benchmarks/parity.py --runs_dir runs/parity --script run_squad.py --max_steps 20
    GLUE_DIR=... python benchmarks/parity.py --runs_dir runs/engines-parity --sync engines

Without --sync, the four tasks' scripts train on 1, 2 and 4 ranks, three times: by AdamW with clipping, as BERT is
fine-tuned, and by SGD without and with momentum and without clipping. AdamW's step, like a clipped one, hardly depends
on the gradient's scale, so a sum would pass there for an average. SGD distinguishes them if its weights move; how far
they do is printed too. Each optimizer takes about 20 minutes on 2 cores at 40 iterations of RTE.

With --sync (`engines`, or syncs, strategies and libraries, separated by commas) each is trained on 4 ranks, with the
given flags. One that fails is a row with its error. All digits go to parity.json in the folder.

A run that is in the folder already is not made again.
"""

import argparse
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch
from made import make_run

from cos598d.commands.flags import to_words
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.tables import as_text
from cos598d.tools.bench.candidates import read_candidate
from cos598d.tools.report.fairness import work_remark
from cos598d.tools.report.load import load_run

LESSONS = ("task2a", "task2b", "task3")
# dp is one process, and without several GPUs just the module.
ENGINES = (
    "ddp,torch_zero1,torch_fsdp,torch_fsdp:reduce_scatter=torch,deepspeed:zero_stage=0,deepspeed:zero_stage=1,"
    "deepspeed:zero_stage=2,deepspeed:zero_stage=3,horovod,fabric,fabric:fabric_strategy=fsdp2,zero1,zero2,zero3"
)
# Each one's changes to a run's flags, and the suffix of its folders.
OPTIMIZERS = {
    "adamw": (["--optimizer", "adamw"], ""),
    "sgd": (["--optimizer", "sgd", "--learning_rate", "0.05", "--max_grad_norm", "0"], "-sgd"),
    "momentum": (
        ["--optimizer", "sgd", "--momentum", "0.9", "--learning_rate", "0.005", "--max_grad_norm", "0"],
        "-momentum",
    ),
}
# One step at a rate of 0 leaves the weights that all runs start from.
FIRST = ["--max_steps", "1", "--learning_rate", "0", "--weight_decay", "0"]
# Softmax over the keys does not change when all scores of a query shift equally, so the true gradient of a key's bias
# is zero. What Adam sees there is rounding noise, which it scales up to whole steps.
KEY_BIASES = ("attention.self.key.bias", "attention.attention.key.bias")  # BERT's, and those of the vision transformer


def main() -> int:
    """Make the missing runs, print the tables and return 0, or 1 if a run failed or was other work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2, 4], help="the lessons' ranks")
    parser.add_argument("--optimizers", choices=OPTIMIZERS, nargs="+", default=list(OPTIMIZERS), help="the lessons'")
    parser.add_argument("--script", choices=("run_glue.py", "run_squad.py"), default="run_glue.py")
    parser.add_argument("--sync", help=f"these in the lessons' place; engines: {ENGINES}")
    parser.add_argument("--world_size", type=int, default=4, help="ranks with --sync (default: 4)")
    options, flags = parser.parse_known_args()
    if not any(flag.startswith("--max_steps") for flag in flags):
        flags += ["--max_steps", "40"]
    if options.sync:
        return compare_syncs(options, flags)
    start = lesson_run(options, "start", "task1", 1, [*flags, *FIRST])
    for name in options.optimizers:
        own, ending = OPTIMIZERS[name]
        compare_lessons(options, start, name, [*own, *flags], ending)
    return 0


def lesson_run(options: argparse.Namespace, name: str, lesson: str, world_size: int, flags: list[str]) -> Path:
    """The folder of a task script's run. Raises UserError if it fails."""
    ranks = [] if world_size == 1 else ["--world_size", world_size]
    return make_run(options.runs_dir / name, [ROOT / lesson / options.script, "--do_train", *ranks, *flags])


def compare_lessons(options: argparse.Namespace, start: Path, name: str, flags: list[str], ending: str) -> None:
    """Make the runs of one optimizer and print their differences."""
    alone = lesson_run(options, f"task1{ending}", "task1", 1, flags)
    print(f"{name}: {learned(alone, start)}")
    print("run           losses, to task 1   among equal n   weights, to task 1   key biases apart", flush=True)
    for size in options.world_sizes:
        runs = {lesson: lesson_run(options, f"{lesson}-n{size}{ending}", lesson, size, flags) for lesson in LESSONS}
        among = max(loss_difference(runs[a], runs[b]) for a, b in combinations(LESSONS, 2))
        for lesson, folder in runs.items():
            everywhere, apart = weight_differences(folder, alone)
            print(
                f"{lesson} n={size}    {loss_difference(folder, alone):.1e}             {among:.1e}"
                f"         {everywhere:.1e}              {apart:.1e}",
                flush=True,
            )


def compare_syncs(options: argparse.Namespace, flags: list[str]) -> int:
    """Make a run of each sync, print their differences from task 1 and save them. Return 1 if one failed."""

    def run(name: str, ranks: int, *words: str) -> Path:
        train = ["-m", "cos598d", "train", "--world_size", ranks, "--do_train", *words]
        return make_run(options.runs_dir / name, train)

    start = run("start", 1, "--sync", "none", *flags, *FIRST)
    alone = run("task1", 1, "--sync", "none", *flags)
    found: dict[str, dict[str, Any]] = {}
    rows = [["sync", "losses, to task 1", "weights, to task 1", "without key biases"]]
    for word in (ENGINES if options.sync == "engines" else options.sync).split(","):
        name, values = read_candidate(word)
        try:
            own = to_words({"sync": name, **values}, RunConfig)
            found[word] = differences(run(word.replace(":", "-"), options.world_size, *own, *flags), alone)
            rows.append([word, *(f"{value:.1e}" for value in found[word].values())])
        except UserError as error:
            found[word] = {"failed": str(error)}
            rows.append([word, "failed", "-", "-"])
    losses, (moved, _) = load_run(alone)["losses"], weight_differences(alone, start)
    facts = {"iterations": len(losses), "first_loss": losses[0], "last_loss": losses[-1], "weights_moved_by": moved}
    write_json(options.runs_dir / "parity.json", {"flags": flags, "task1": facts, "engines": found})
    print(f"\n{learned(alone, start)}. Largest differences:\n{as_text(rows, numbers=True)}")
    failures = [f"{word}: {facts['failed']}" for word, facts in found.items() if "failed" in facts]
    print(*failures, sep="\n", end="\n" if failures else "")
    return int(bool(failures))


def differences(run: Path, alone: Path) -> dict[str, float]:
    """The largest differences of a run from task 1's. Raises UserError if they did not do the same work."""
    summaries = [load_run(alone), load_run(run)]
    if len(summaries[0]["losses"]) != len(summaries[1]["losses"]):
        raise UserError("it has another number of iterations than task 1: give a new --runs_dir.")
    # Different losses are what the table is about.
    remark = work_remark([summary | {"losses": [0.0] * len(summary["losses"])} for summary in summaries])
    if remark:
        raise UserError(remark)
    everywhere, apart = weight_differences(run, alone)
    return {"losses": loss_difference(run, alone), "weights": everywhere, "weights_but_key_biases": apart}


def learned(alone: Path, start: Path) -> str:
    """A sentence on what task 1 has learned."""
    losses, (moved, _) = load_run(alone)["losses"], weight_differences(alone, start)
    return f"task 1's loss goes from {losses[0]:.4f} to {losses[-1]:.4f}, its weights move by up to {moved:.1e}"


def loss_difference(first: Path, second: Path) -> float:
    """The largest difference of two runs' losses at any iteration."""
    return max(abs(a - b) for a, b in zip(load_run(first)["losses"], load_run(second)["losses"], strict=True))


def weight_differences(first: Path, second: Path) -> tuple[float, float]:
    """The largest difference of two runs' final weights: over all, and without the key biases."""
    a, b = (torch.load(folder / "model" / "pytorch_model.bin", weights_only=True) for folder in (first, second))
    found = {name: (a[name] - b[name]).abs().max().item() for name in a}
    return max(found.values()), max(value for name, value in found.items() if not name.endswith(KEY_BIASES))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
