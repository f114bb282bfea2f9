"""A run that goes on with other ranks, or under another sync: how far do its losses come from those of one start?

    GLUE_DIR=... python benchmarks/resume_elsewhere.py --runs_dir runs/moves --moves bucketed:4,bucketed:2,bucketed:3 \\
        --max_steps 60 [any other flag of a run]

The first of the moves (SYNC:RANKS) makes the whole run once. Then the run is started as the first move says, and asked
to stop by SIGTERM when its share of the steps is over. It is resumed as the second one says with --resume auto, and so
on to its end. Without dropout the batches are the same, so the losses differ only by rounding. It prints the largest
difference over all iterations, and over those of each start.
"""

import argparse
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cos598d.tools.report.load import load_run

GOES_ON = 75
# MiniLM on RTE, unless other flags are given.
FLAGS = ["--task_name", "rte", "--model_name_or_path", "minilm", "--do_train", "--dropout", "0", "--no_save_model"]
FLAGS += ["--total_train_batch_size", "24", "--log_every", "1"]


def main() -> int:
    """Make both runs and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--moves", required=True, help="SYNC:RANKS,SYNC:RANKS and so on")
    parser.add_argument("--max_steps", type=int, default=60)
    options, flags = parser.parse_known_args()
    moves = [(sync, int(ranks)) for sync, _, ranks in (move.partition(":") for move in options.moves.split(","))]
    flags = [*FLAGS, *flags, "--max_steps", str(options.max_steps)]
    whole, moved = options.runs_dir / "whole", options.runs_dir / "moved"
    if not (whole / "summary.json").exists():
        start(whole, *moves[0], flags, None)
    begun = [0]
    for place, (sync, ranks) in enumerate(moves, start=1):
        stop = None if place == len(moves) else place * options.max_steps // len(moves)
        begun.append(start(moved, sync, ranks, [*flags, "--resume", "auto"], stop) or options.max_steps)
    expected, found = load_run(whole)["losses"], load_run(moved)["losses"]
    apart = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    for (sync, ranks), (first, last) in zip(moves, pairwise(begun), strict=True):
        most = max(apart[first:last])
        print(f"iterations {first + 1:3} to {last:3}, {sync} on {ranks} ranks: losses differ by at most {most:.1e}")
    print(f"all {len(apart)} iterations, from a loss of {expected[0]:.4f} to {expected[-1]:.4f}: {max(apart):.1e}")
    return 0


def start(folder: Path, sync: str, ranks: int, flags: list[str], stop: int | None) -> int | None:
    """Start the run, and ask it to stop after iteration `stop`. Return where it stopped. Exits if it fails."""
    words = ["-m", "cos598d", "train", "--world_size", str(ranks), "--sync", sync, "--output_dir", str(folder), *flags]
    said = []
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None  # it is a pipe
        for line in run.stdout:
            said.append(line)
            done = re.match(r"iteration (\d+):", line)
            if done and int(done[1]) == stop:
                run.send_signal(signal.SIGTERM)
    stopped = re.search(r"after iteration (\d+): start it again", "".join(said))
    if run.returncode == 0 and stop is None:
        return None
    if run.returncode == GOES_ON and stopped:
        return int(stopped[1])
    sys.exit(f"{' '.join(words)} ended with exit code {run.returncode}:\n{''.join(said)}")


if __name__ == "__main__":
    sys.exit(main())
