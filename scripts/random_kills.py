"""A tiny run that is killed at random, over and over, until it is finished: does it end as one that was left alone?

    python scripts/random_kills.py --kills 200 --seed 1

1. A run of 2 ranks is made once without interruption.
2. The same run is started in a folder of its own. At a random moment SIGKILL ends one of its ranks, or both at once.
   Whatever checkpoints have their names then must be whole to the last byte.
3. It is started again with --resume auto, and so on until it ends; then its losses and weights must be the first run's.
   Further runs follow until there were so many kills.

The same seed draws the same moments; where in the run they fall depends on the machine. Exit code 0: all was equal.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lives import all_whole, checkpoints_in, live  # noqa: E402

from cos598d.tools.check.spawn import RETURNED, run_world  # noqa: E402

RANKS, STEPS, INTERVAL = 2, 150, 5
VALUES = {"max_steps": STEPS, "save_steps": INTERVAL, "eval_steps": 20, "resume": "auto"}
SYNCS = ("bucketed", "zero1", "local_sgd", "ddp", "zero3")
LONGEST = 1.5  # seconds from a rank's start to its end
START_SECONDS = 120


def mortal(comm: Any, folder: str, values: dict[str, Any], deaths: dict[str, float]) -> dict[str, Any]:
    """A start of the run; `deaths` has, by rank, after how many seconds it is killed."""
    seconds = deaths.get(str(comm.rank))
    if seconds is not None:

        def die() -> None:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    return live(comm, folder, values)


def start(folder: Path, values: dict[str, Any], deaths: dict[int, float]) -> list[Any] | None:
    """Every rank's result; None of a start that was killed. Raises RuntimeError for one that ended by itself."""
    named = {str(rank): seconds for rank, seconds in deaths.items()}
    ends = run_world(RANKS, mortal, str(folder), values, named, seconds=START_SECONDS)
    if all(end.how == RETURNED for end in ends):
        return [end.value for end in ends]
    if not any(end.exit_code == -signal.SIGKILL for end in ends):
        raise RuntimeError("\n".join(end.traceback or end.output or end.how for end in ends))
    return None


def run_to_its_end(folder: Path, values: dict[str, Any], draw: random.Random, counts: Counter) -> list[Any]:
    """Start the run and kill it until it ends; every rank's result. `counts` gets what happened."""
    while True:
        ranks = draw.choice([(0,), (1,), (0, 1)])
        moment = draw.uniform(0, LONGEST)
        found = start(folder, values, dict.fromkeys(ranks, moment))
        if found is not None:
            return found
        counts["kills"] += 1
        if not all_whole(folder):
            raise RuntimeError(f"a checkpoint in {folder} is damaged")
        if counts["kills"] % 10 == 0:
            print(f"{counts['kills']} kills, checkpoints {checkpoints_in(folder)}", flush=True)


def lost_in(folder: Path) -> list[int]:
    """How many iterations each start of the run had made that a later one made again."""
    attempts = json.loads((folder / "live" / "attempts.json").read_text())["attempts"]
    return [attempt["lost_iterations"] for attempt in attempts]


def main() -> int:
    """Kill, compare, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many in all (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    options = parser.parse_args()
    draw, counts, lost = random.Random(options.seed), Counter(), []
    with tempfile.TemporaryDirectory(prefix="cos598d-kills-") as name:
        place = Path(name)
        os.environ.setdefault("COS598D_CACHE", str(place / "cache"))
        expected: dict[str, list[Any]] = {}
        while counts["kills"] < options.kills:
            sync = SYNCS[counts["runs"] % len(SYNCS)]
            values = VALUES | {"sync": sync} | ({"sync_every": 4} if sync == "local_sgd" else {})
            if sync not in expected:
                expected[sync] = start(place / sync, values, {}) or []
            folder = place / f"run{counts['runs']}"
            found = run_to_its_end(folder, values, draw, counts)
            for one, other in zip(found, expected[sync], strict=True):
                if one["losses"] != other["losses"] or one["weights"] != other["weights"]:
                    print(f"run {counts['runs']} ({sync}) ended otherwise than the run that was left alone")
                    return 1
            counts["runs"] += 1
            lost += lost_in(folder)
            print(f"run {counts['runs']} ({sync}) is equal, after {counts['kills']} kills in all", flush=True)
    print(
        f"{counts['kills']} kills, {counts['runs']} runs, all equal to the last bit; a kill cost at most {max(lost)} "
        f"iterations of {STEPS}, {sum(lost) / len(lost):.1f} in the mean, with a checkpoint every {INTERVAL}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
