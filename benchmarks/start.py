"""The cost of a run apart from its steps: from the command to the end of a run of one step, on local ranks.

    python benchmarks/start.py [--world_sizes 1,4] [--rounds 5] [--before TREE] [-- FLAGS OF train]

It measures wall seconds to each stage of the run, and the CPU seconds of all its processes. With --before it also
measures another checkout (`git worktree add TREE COMMIT`), in turn with this one and in another order each round. The
step uses the bundled sample. One run of each comes first and is not counted, so that files and features are cached.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The beginning of a run's output at each stage.
MARKS = {"they have met": "train: ", "the step is done": "iteration 1: ", "the end": None}
CPU = "processor"


def main() -> None:
    """Measure, and print a line for each number of ranks and tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_sizes", default="1,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, measured in turn with this one")
    parser.add_argument("--model", default="minilm", help="as --model_name_or_path (default: minilm)")
    parser.add_argument("flags", nargs="*", help="further flags of train, after --")
    options = parser.parse_args()
    trees = {"here": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    print(
        f"{'ranks':>5} {'tree':>7}" + "".join(f" {head:>24}" for head in (*MARKS, CPU)) + "   (median, least - most, s)"
    )
    for size in map(int, options.world_sizes.split(",")):
        for name, rounds in measure(size, trees, options.rounds, options.model, options.flags).items():
            cells = [_in_words([one[head] for one in rounds]) for head in (*MARKS, CPU)]
            print(f"{size:5d} {name:>7}" + "".join(f" {cell:>24}" for cell in cells), flush=True)


def measure(
    size: int, trees: dict[str, Path], rounds: int, model: str, flags: list[str]
) -> dict[str, list[dict[str, float]]]:
    """Each tree's rounds: seconds from the command to each of MARKS, and CPU seconds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="cos598d-start-") as folder:
        for turn in range(-1, rounds):
            for name in sorted(trees, reverse=bool(turn % 2)):
                one = run(trees[name], Path(folder), size, model, flags)
                if turn >= 0:
                    found[name].append(one)
    return found


def run(tree: Path, folder: Path, size: int, model: str, flags: list[str]) -> dict[str, float]:
    """One run of that checkout's code."""
    words = ["--world_size", str(size), "--model_name_or_path", model, "--max_steps", "1", "--do_train"]
    words += ["--no_save_model", "--output_dir", str(folder / "out"), "--overwrite_output_dir"]
    environ = {name: value for name, value in os.environ.items() if name != "GLUE_DIR"}
    environ |= {"PYTHONPATH": str(tree), "COS598D_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "cos598d", "train", *words, *flags]
    before, began = _children_seconds(), time.perf_counter()
    found: dict[str, float] = {}
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None  # a pipe, as asked for above
        for line in program.stdout:
            for mark, beginning in MARKS.items():
                if beginning and line.startswith(beginning):
                    found[mark] = time.perf_counter() - began
    found["the end"] = time.perf_counter() - began
    if program.returncode or len(found) < len(MARKS):
        raise SystemExit(f"the run in {tree} ended with exit code {program.returncode}; see its error above.")
    return found | {CPU: _children_seconds() - before}


def _children_seconds() -> float:
    """The CPU seconds of all processes that were started from here and have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _in_words(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f})"


if __name__ == "__main__":
    main()
