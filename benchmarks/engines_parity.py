"""Do the engines train as task 1 does? Losses of every iteration and final weights of each, on 4 ranks, beside its.

    GLUE_DIR=... python benchmarks/engines_parity.py --runs_dir runs/parity [--sync zero1,fabric] [a run's flags]

RTE, MiniLM, 64 examples per step, no dropout, 40 iterations: flags of a run, such as --max_steps, change
that for all alike. A run that stands in the folder already is not made again; one that fails is a row that says so. The
table is printed and, with all digits, written to parity.json in the folder.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from parity import loss_difference, weight_differences

from cos598d.commands.flags import to_words
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.program import own_environment
from cos598d.terminal.tables import as_text
from cos598d.tools.bench.candidates import read_candidate
from cos598d.tools.report.fairness import work_remark
from cos598d.tools.report.load import load_run

# dp is one process, and without several GPUs just the module.
ENGINES = (
    "ddp,torch_zero1,torch_fsdp,torch_fsdp:reduce_scatter=torch,deepspeed:zero_stage=0,deepspeed:zero_stage=1,"
    "deepspeed:zero_stage=2,deepspeed:zero_stage=3,horovod,fabric,fabric:fabric_strategy=fsdp2,zero1,zero2,zero3"
)
HEAD = ["engine", "losses, to task 1", "weights, to task 1", "without key biases"]


def main() -> int:
    """Make the runs that are not there, print the table and return 0, or 1 where a run failed or was other work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--sync", default=ENGINES, help=f"engines to compare, separated by commas (default: {ENGINES})")
    parser.add_argument("--world_size", type=int, default=4)
    options, flags = parser.parse_known_args()
    if not any(flag.startswith("--max_steps") for flag in flags):
        flags += ["--max_steps", "40"]
    engines = {word: read_candidate(word) for word in options.sync.split(",")}
    # One step at a rate of 0 leaves the weights that all runs start from.
    first = ["--max_steps", "1", "--learning_rate", "0", "--weight_decay", "0"]
    start = make_run(options.runs_dir / "start", 1, ["--sync", "none", *flags, *first])
    alone = make_run(options.runs_dir / "task1", 1, ["--sync", "none", *flags])
    found, rows = {}, [HEAD]
    for word, (name, values) in engines.items():
        own = to_words({"sync": name, **values}, RunConfig)
        try:
            run = make_run(options.runs_dir / word.replace(":", "-"), options.world_size, [*own, *flags])
            found[word] = compare(run, alone)
            rows.append([word, *(f"{value:.1e}" for value in found[word].values())])
        except UserError as error:
            found[word] = {"failed": str(error)}
            rows.append([word, "failed", "-", "-"])
    losses, (moved, _) = load_run(alone)["losses"], weight_differences(alone, start)
    facts = {"iterations": len(losses), "first_loss": losses[0], "last_loss": losses[-1], "weights_moved_by": moved}
    write_json(options.runs_dir / "parity.json", {"flags": flags, "task1": facts, "engines": found})
    learned = f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} iterations"
    print(f"\ntask 1: {learned}; weights move by up to {moved:.1e}. Largest differences:")
    print(as_text(rows, numbers=True))
    failures = [f"{word}: {facts['failed']}" for word, facts in found.items() if "failed" in facts]
    print(*failures, sep="\n", end="\n" if failures else "")
    return int(bool(failures))


def make_run(folder: Path, ranks: int, flags: list[str]) -> Path:
    """The folder of the run, made if it is not there yet. Raises UserError where it fails."""
    if not (folder / "summary.json").exists():
        words = ["--world_size", str(ranks), "--do_train", "--output_dir", str(folder), "--overwrite_output_dir"]
        print(f"\n== {folder.name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "cos598d", "train", *words, *flags]
        done = subprocess.run(command, env=own_environment(), stdout=sys.stderr, check=False)
        if done.returncode:
            raise UserError(f"its run ended with exit code {done.returncode}; what it said stands above.")
    return folder


def compare(run: Path, alone: Path) -> dict[str, Any]:
    """The largest differences of a run from task 1's. Raises UserError where they did not do the same work."""
    summaries = [load_run(alone), load_run(run)]
    if len(summaries[0]["losses"]) != len(summaries[1]["losses"]):
        raise UserError("it has another number of iterations than task 1: give a new --runs_dir.")
    # That the losses part is what the table is to show.
    remark = work_remark([summary | {"losses": [0.0] * len(summary["losses"])} for summary in summaries])
    if remark:
        raise UserError(remark)
    everywhere, apart = weight_differences(run, alone)
    return {"losses": loss_difference(run, alone), "weights": everywhere, "weights_but_key_biases": apart}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
