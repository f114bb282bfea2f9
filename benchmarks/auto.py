"""Compare the choice of `--sync auto` with the measured fastest, over links, delays and models.

    python benchmarks/auto.py --runs_dir runs/auto [--places loopback,1gbit,1gbit-10ms] [--models minilm] [--rounds 3]
        [--sync sparse_rows,sparse_zero1]

Places: loopback (4 ranks of this host), and four emulated hosts at 1gbit and at 100mbit, each without a delay and with
10ms. For each place and model, a bench measures whole steps of the candidates, and a run of one step with `--sync auto`
on as many examples chooses one. Lost: by how much the chosen one's step is slower than the fastest one's, by the
bench's medians. `--sync` limits the candidates if all of them would take too long. Existing results in the folder are
reused. The table is printed and written to auto.json there.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from made import call, make_run

from cos598d.errors import UserError
from cos598d.records.conventions import FLOORS
from cos598d.records.run import read_record, read_summary
from cos598d.terminal.files import write_json
from cos598d.terminal.tables import as_text

# Rate and delay of the links between hosts; None: one host.
PLACES: dict[str, tuple[str, str] | None] = {
    "loopback": None,
    "1gbit": ("1gbit", "0"),
    "1gbit-10ms": ("1gbit", "10ms"),
    "100mbit": ("100mbit", "0"),
    "100mbit-10ms": ("100mbit", "10ms"),
}
MODELS = ("minilm", "bert-base")
RANKS, BATCH, TOKENS = 4, 4, 64
BETWEEN_HOSTS = "ddp,bucketed,flat,ring,halving_doubling,all_reduce,sparse_rows,zero1,sparse_zero1"
ON_ONE_HOST = f"{BETWEEN_HOSTS},shared_memory,shared_weights"
HEAD = ["link", "model", "chosen", "s", "predicted s", "quickest", "s", "lost"]


def main() -> int:
    """Measure what is missing, print the table and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--places", default=",".join(PLACES), help="which, separated by commas (default: all)")
    parser.add_argument("--models", default=",".join(MODELS), help="which, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sync", help="the candidates in addition to DDP (default: all that may be the fastest)")
    options = parser.parse_args()
    rows = []
    for place in options.places.split(","):
        for model in options.models.split(","):
            folder = options.runs_dir.resolve() / f"{place}-{model}"
            measure(PLACES[place], model, options.rounds, options.sync, folder)
            rows.append({"place": place, "model": model} | beside(folder))
            print(*cells(rows[-1]), file=sys.stderr, flush=True)
    write_json(options.runs_dir / "auto.json", rows)
    print(as_text([HEAD, *map(cells, rows)], numbers=True))
    return 0


def measure(link: tuple[str, str] | None, model: str, rounds: int, candidates: str | None, folder: Path) -> None:
    """The bench and the run in a folder, unless they exist. Raises UserError if one fails."""
    hosts = []
    if link is not None:
        places = ["--hosts", RANKS, "--rate", link[0], "--delay", link[1]]
        hosts = ["-m", "cos598d", "cluster", "run", *places, "--", sys.executable]
    ranks = [] if link else ["--world_size", RANKS]
    if not (folder / "bench" / "bench.json").exists():
        syncs = candidates or (BETWEEN_HOSTS if link else ON_ONE_HOST)
        words = ["--step", "--rounds", rounds, "--model", model, "--batch", BATCH, "--tokens", TOKENS, *ranks]
        place = ["--sync", syncs, "--output", folder / "bench"]
        call([*hosts, "-m", "cos598d", "bench", *words, *place], subprocess.DEVNULL)
    words = ["--task_name", "rte", "--model_name_or_path", model, "--do_train", "--max_steps", 1, "--no_save_model"]
    words += ["--total_train_batch_size", RANKS * BATCH, "--max_seq_length", TOKENS, "--sync", "auto", *ranks]
    make_run(folder / "run", [*hosts, "-m", "cos598d", "train", *words], subprocess.DEVNULL)


def beside(folder: Path) -> dict[str, Any]:
    """The chosen and the fastest sync, with the bench's seconds."""
    _, bench = read_record(folder / "bench")
    seconds = {label: found["seconds_median"] for label, found in bench["summary"].items() if label not in FLOORS}
    choice = read_summary(folder / "run")["auto"]
    chosen, quickest = choice["sync"], min(seconds, key=lambda label: seconds[label])
    if chosen not in seconds:
        raise UserError(f"{chosen}, which was chosen, is not in the bench of {folder}. Name it among the candidates.")
    return {
        "chosen": chosen,
        "seconds": seconds[chosen],
        "predicted_seconds": choice["predicted"][chosen],
        "quickest": quickest,
        "quickest_seconds": seconds[quickest],
        "lost": seconds[chosen] / seconds[quickest] - 1,
        "measured": choice["measured"],
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    return [
        *(row["place"], row["model"], row["chosen"], f"{row['seconds']:.3f}", f"{row['predicted_seconds']:.3f}"),
        *(row["quickest"], f"{row['quickest_seconds']:.3f}", f"{100 * row['lost']:.1f} %"),
    ]


if __name__ == "__main__":
    sys.exit(main())
