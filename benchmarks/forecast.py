"""Compare the forecast of `train --dry_run` with what happened: bytes, memory and seconds, and the errors.

    python benchmarks/forecast.py --runs_dir runs/forecast [--works digits,rte] [--sync ddp,zero3] [--ranks 1,2,4]
                                  [--steps 20] [--from BENCH ...]

Each run has local ranks, without evaluation and checkpoints. Bytes are an epoch's, of rank 0. Memory is counted at a
step's peak on the rank that holds most. Seconds are the mean of the iterations that a record counts. A run that is in
the folder already is not made again; its forecast is. The table is printed and, with all digits, written to
forecast.json in the folder.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from cos598d.cost.planned import Known
from made import make_run

from cos598d.commands.flags import to_words
from cos598d.config import RunConfig, config_from
from cos598d.cost.forecast import Forecast, forecast
from cos598d.terminal.files import write_json
from cos598d.terminal.tables import as_text
from cos598d.tools.report.load import load_run

WORKS = {
    "digits": {"task_name": "digits", "model_name_or_path": "vit-tiny", "model_type": "vit"},
    "rte": {"task_name": "rte", "model_name_or_path": "minilm"},
}
SYNCS = "ddp,bucketed,all_reduce,zero1,zero3"
FEW = {"do_train": True, "save_model": False, "no_cuda": True, "save_epochs": 0}
HEAD = ["work", "sync", "ranks", "MB/epoch", "off", "peak MB", "off", "s/iteration", "happened", "off"]


def main() -> int:
    """Make the missing runs, print the table and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--works", default=",".join(WORKS), help="which, separated by commas (default: all)")
    parser.add_argument("--sync", default=SYNCS, help=f"separated by commas (default: {SYNCS})")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--from", dest="costs_from", nargs="*", type=Path, default=[], metavar="BENCH")
    options = parser.parse_args()
    known, rows = Known(costs_from=tuple(options.costs_from)), []
    for work in options.works.split(","):
        for ranks in map(int, options.ranks.split(",")):
            for sync in options.sync.split(",") if ranks > 1 else ["none"]:
                config = config_from(WORKS[work] | FEW | {"sync": sync, "max_steps": options.steps})
                said = forecast(config, ranks, timings=known)
                folder = run_of(options.runs_dir.resolve() / f"{work}-{sync}-{ranks}", config, ranks)
                rows.append({"work": work, "sync": sync, "ranks": ranks} | beside(said, folder))
                print(*cells(rows[-1]), file=sys.stderr, flush=True)
    write_json(options.runs_dir / "forecast.json", rows)
    print(as_text([HEAD, *map(cells, rows)], numbers=True))
    return 0


def run_of(folder: Path, config: RunConfig, ranks: int) -> Path:
    """The run's folder; it is made unless it exists. Raises UserError if it fails."""
    given = {name: getattr(config, name) for name in (*WORKS["digits"], *FEW, "sync", "max_steps")}
    words = ["-m", "cos598d", "train", *to_words(given, RunConfig), "--world_size", ranks]
    return make_run(folder, words, subprocess.DEVNULL)


def beside(said: Forecast, folder: Path) -> dict[str, Any]:
    """The forecast and the measurement of bytes, memory and seconds."""
    run = load_run(folder)
    held = max(sum(held.values()) for held in run["memory"]["peak"])
    pairs = {
        "bytes": (said.bytes_sent_per_epoch[0], run["epochs"][0]["predicted_bytes_sent"][0]),
        "memory": (said.peak_bytes, held),
        "seconds": (said.seconds_per_iteration, run["seconds_per_iteration"]["mean"]),
    }
    return {
        name: {"said": mine, "happened": theirs, "off": mine / theirs - 1 if theirs else 0.0}
        for name, (mine, theirs) in pairs.items()
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    off = {name: f"{100 * row[name]['off']:+.1f} %" for name in ("bytes", "memory", "seconds")}
    return [
        *(row["work"], row["sync"], str(row["ranks"])),
        *(f"{row['bytes']['said'] / 1e6:.2f}", off["bytes"], f"{row['memory']['said'] / 1e6:.1f}", off["memory"]),
        *(f"{row['seconds']['said']:.4f}", f"{row['seconds']['happened']:.4f}", off["seconds"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
