"""The cost of a run by its number of ranks: seconds, memory, connections; a tiny model on this host.

    python benchmarks/ranks.py --runs_dir runs/ranks [--world_sizes 4,8,16,32,64] [--sync ddp] [--steps 6]

Each run is `train --world_size N` itself (`marked.py`), one thread per rank. If there are more ranks than cores, they
take turns, and all wait for each one's own work. So a phase's wall time, from the first rank's beginning to the last
one's end, grows with the CPU seconds of all ranks; the second table has their sum. Both end with the exponent p of n^p,
fitted to the numbers of ranks from 16 up. A constant cost has p = 0; work that each rank does once, on shared cores,
has p = 1. Pairs of ranks are n^2: gloo connects every pair, and its ring takes 2(n-1) steps on each of n ranks.

A run that is in the folder already is not made again. The tables are printed and, with all digits, written to
ranks.json there, and drawn to ranks.svg.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from growth import draw, in_words

from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.program import own_environment
from cos598d.terminal.tables import as_text

FLAGS = "--do_train --model_name_or_path tiny --threads 1 --per_gpu_train_batch_size 1 --no_save_model --save_epochs 0"
# Phases of a rank's life, in order. A step is one of the later ones.
PHASES = ("meeting", "lifeline", "group", "attaching", "first step", "step", "record", "leaving")


def main() -> int:
    """Make the missing runs, print the tables and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--world_sizes", default="4,8,16,32,64")
    parser.add_argument("--sync", default="ddp")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    found = {}
    for size in map(int, options.world_sizes.split(",")):
        path = options.runs_dir.resolve() / f"{options.sync}-{size}.json"
        if not path.exists():
            write_json(path, measure(size, options.sync, options.steps))
        found[size] = json.loads(path.read_text())
        print(f"{size} ranks: {found[size]['seconds']:.1f} s", file=sys.stderr, flush=True)
    write_json(options.runs_dir / "ranks.json", list(found.values()))
    for title, rows in tables(found).items():
        print(f"{title}\n{as_text(rows, numbers=True)}\n")
    draw(
        options.runs_dir / "ranks.svg", panels(found), f"one run of a tiny model, {options.sync}, all ranks on one host"
    )
    return 0


def measure(size: int, sync: str, steps: int) -> dict[str, Any]:
    """One run of `size` ranks, and their notes of it. Raises UserError if it fails."""
    with tempfile.TemporaryDirectory(prefix="cos598d-ranks-") as name:
        folder = Path(name)
        marks, out = folder / "marks", folder / "out"
        words = [*FLAGS.split(), "--sync", sync, "--max_steps", str(steps), "--world_size", str(size)]
        command = [sys.executable, str(ROOT / "benchmarks" / "marked.py"), "train", *words, "--output_dir", str(out)]
        environ = {name: value for name, value in own_environment().items() if name != "GLUE_DIR"}
        environ |= {"MARKS": str(marks), "COS598D_CACHE": str(folder / "cache")}
        load, began = os.getloadavg()[0], time.monotonic()
        code = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=False, cwd=folder).returncode
        seconds = time.monotonic() - began
        if code:
            raise UserError(f"the run of {size} ranks ended with exit code {code}; see its error above.")
        ranks = [json.loads((marks / f"rank{rank}.json").read_text()) for rank in range(size)]
        starter = json.loads((marks / "starter.json").read_text())
        shutil.rmtree(out)
    return {"ranks": size, "sync": sync, "steps": steps, "seconds": seconds, "load_before": load} | summary(
        ranks, starter, began
    )


def summary(ranks: list[dict[str, Any]], starter: dict[str, Any], began: float) -> dict[str, Any]:
    """The summary of the ranks' notes."""
    clock, used = {}, {}
    for phase in PHASES:
        spans = [[span[1:] for span in rank["phases"] if span[0] == phase] for rank in ranks]
        rounds = list(zip(*spans, strict=True))  # a round has one span per rank
        clock[phase] = median(max(end for _, end, _ in one) - min(start for start, _, _ in one) for one in rounds)
        used[phase] = median(sum(seconds for _, _, seconds in one) for one in rounds)
    life = [span[1:] for rank in ranks for span in rank["phases"] if span[0] == "life"]
    begun = {name: [start - began, end - began, seconds] for name, start, end, seconds in starter["phases"]}
    others = ranks[1:]
    return {
        "starter": begun,
        "met_seconds": max(span[2] for rank in ranks for span in rank["phases"] if span[0] == "meeting") - began,
        "life_processor_seconds": sum(seconds for *_, seconds in life),
        "clock_seconds": clock,
        "processor_seconds": used,
        "held": {
            name: {"rank_0": ranks[0]["held"][name], "mean": mean(rank["held"][name] for rank in others)}
            for name in ranks[0]["held"]
        },
    }


def of_all(one: Mapping[str, Any], name: str) -> float:
    """The sum of something that all ranks hold."""
    held = one["held"][name]
    return held["rank_0"] + held["mean"] * (one["ranks"] - 1)


def tables(found: Mapping[int, Mapping[str, Any]]) -> dict[str, list[list[str]]]:
    """The tables by their titles."""
    clock = {"met": lambda one: one["met_seconds"]}
    clock |= {phase: (lambda one, phase=phase: one["clock_seconds"][phase]) for phase in PHASES}
    clock |= {"command": lambda one: one["seconds"]}
    used = {phase: (lambda one, phase=phase: one["processor_seconds"][phase]) for phase in PHASES}
    used |= {"all of a life": lambda one: one["life_processor_seconds"]}
    held = {
        "memory, all, MB": lambda one: of_all(one, "pss_bytes") / 1e6,
        "a rank, MB": lambda one: one["held"]["pss_bytes"]["mean"] / 1e6,
        "its own": lambda one: one["held"]["own_bytes"]["mean"] / 1e6,
        "sockets, all": lambda one: of_all(one, "sockets"),
        "a rank": lambda one: one["held"]["sockets"]["mean"],
        "rank 0": lambda one: one["held"]["sockets"]["rank_0"],
        "descriptors": lambda one: one["held"]["descriptors"]["mean"],
        "threads": lambda one: one["held"]["threads"]["mean"],
    }
    return {
        "seconds by the clock ('met' and 'command': since the command began)": _table(found, clock, "{:.3f}"),
        "the processor's seconds of all ranks together": _table(found, used, "{:.3f}"),
        "held after the last step ('a rank': the mean of all but rank 0)": _table(found, held, "{:.1f}"),
    }


def _table(found: Mapping[int, Mapping[str, Any]], columns: Mapping[str, Any], form: str) -> list[list[str]]:
    rows = [["ranks", *columns]]
    rows += [[str(size), *(form.format(value(one)) for value in columns.values())] for size, one in found.items()]
    rows.append(["grows as", *(in_words({n: value(one) for n, one in found.items()}) for value in columns.values())])
    return rows


def panels(found: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """The drawing's contents: wall seconds and CPU seconds, and what ranks hold."""
    return {
        "seconds by the clock": {
            phase: {n: one["clock_seconds"][phase] for n, one in found.items()} for phase in PHASES
        },
        "processor's seconds of all ranks": {
            phase: {n: one["processor_seconds"][phase] for n, one in found.items()} for phase in PHASES
        },
        "of all ranks": {
            "memory, MB": {n: of_all(one, "pss_bytes") / 1e6 for n, one in found.items()},
            "sockets": {n: of_all(one, "sockets") for n, one in found.items()},
        },
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
