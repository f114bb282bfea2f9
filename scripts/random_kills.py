"""A tiny run that is killed at random, over and over, until it is finished: does it end as one that was left alone?

    python scripts/random_kills.py --kills 20 --seed 1 --sync zero1

1. A run of 2 ranks is made once without interruption.
2. The same command is started in a folder of its own. At a random moment SIGKILL ends one of its processes.
3. It is started again with --resume auto, and so on until it ends; then its losses and its model's weights must be
   equal to the first run's. Further runs follow until there were so many kills.

The same seed draws the same moments. Exit code 0: all was equal.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

TRAIN = "train --task_name rte --model_name_or_path tiny --do_train --max_steps 60 --save_steps 5 --keep 2"
LONGEST = 20.0  # seconds from a start to its kill


def start(folder: Path, sync: str) -> subprocess.Popen:
    """Start the run, or go on with it."""
    words = [*TRAIN.split(), "--world_size", "2", "--sync", sync, "--resume", "auto", "--output_dir", str(folder)]
    return subprocess.Popen([sys.executable, "-m", "cos598d", *words], stdout=subprocess.DEVNULL)


def killed(run: subprocess.Popen, draw: random.Random) -> bool:
    """Kill one of the run's processes at a random moment; return whether it was still running."""
    until = time.monotonic() + draw.uniform(1, LONGEST)
    while run.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    if run.poll() is not None:
        return False
    main = psutil.Process(run.pid)
    draw.choice([main, *main.children(recursive=True)]).kill()
    run.wait()
    return True


def ended_with(folder: Path) -> tuple[list[float], bytes]:
    """The losses of a finished run, and its model's weights."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary["losses"], (folder / "model" / "pytorch_model.bin").read_bytes()


def main() -> int:
    """Kill, compare, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many in all (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    parser.add_argument("--sync", default="bucketed", help="of the runs (default: bucketed)")
    options = parser.parse_args()
    draw, kills, runs = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="cos598d-kills-") as name:
        alone = Path(name) / "alone"
        start(alone, options.sync).wait()
        while kills < options.kills:
            folder = Path(name) / f"run{runs}"
            while killed(run := start(folder, options.sync), draw):
                kills += 1
            if run.returncode or ended_with(folder) != ended_with(alone):
                print(f"run {runs} ended otherwise than the run that was left alone")
                return 1
            runs += 1
            print(f"run {runs} is equal, after {kills} kills in all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
