"""What an audit costs: a student's script with and without it, in turn, by model and number of ranks (Linux).

    GLUE_DIR=... python benchmarks/audit_cost.py --runs_dir runs/audit-cost [--models bert-base,nanogpt] [--repeats 3]

Every repeat runs `benchmarks/student.py` (`small_gpt.py` for nanogpt) plain and under `cos598d audit`, in another order
each time. Seconds of an iteration are rank 0's own: medians over the steps after those that the audit looks at closely.
The spread is that of the repeats' medians. A ratio is taken within a repeat. Memory is the peak that the kernel counted
of a rank's process, the largest of the ranks. The load is the machine's runnable processes before each run: above 0
others are at work. The table is printed and written to cost.json. It ends with 1 if the losses with and without the
audit are not the same to the last digit.
"""

import argparse
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from beside_student import prepare, student_ranks

from cos598d.terminal.files import write_json
from cos598d.terminal.tables import as_text

EXAMINED = 3
PLAIN, AUDITED = "plain", "audited"
HEAD = [
    "model",
    "ranks",
    "plain s/it",
    "audited s/it",
    "more, by repeat",
    "as told",
    "close s/it",
    "plain MB",
    "audited MB",
    "load",
]
GPT = "nanogpt"


def main() -> int:
    """Make the runs, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--models", default="tiny,minilm", help=f"separated by commas, as --model_name_or_path, or {GPT}"
    )
    parser.add_argument("--ranks", default="2,4", help="separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=16)
    parser.add_argument("--sync", default="ddp", help="gather_scatter, all_reduce or ddp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--total_batch_size", type=int, default=16)
    parser.add_argument("--max_seq_length", type=int, default=64)
    options = parser.parse_args()
    if options.max_steps < EXAMINED + 3:
        parser.error(f"--max_steps must be {EXAMINED + 3} or more: the audit looks closely at the first {EXAMINED}")
    options.runs_dir.mkdir(parents=True)
    rows, found, same = [HEAD], [], True
    for model in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            facts = measure(options, model, ranks)
            found.append(facts)
            rows.append(row(facts))
            same &= facts["same_losses"]
    write_json(options.runs_dir / "cost.json", {"flags": {**vars(options), "runs_dir": ""}, "found": found})
    print(as_text(rows, numbers=True))
    if not same:
        print("Not the same work: losses with and without the audit differ.")
    return int(not same)


def measure(options: argparse.Namespace, model: str, ranks: int) -> dict[str, Any]:
    """All that was measured of one model on so many ranks, by repeat."""
    options.runs_dir, folder = options.runs_dir / f"{model}-{ranks}", options.runs_dir
    options.model, options.world_size = model, ranks
    options.runs_dir.mkdir()
    words = []
    if model != GPT:
        data, saved, _ = prepare(options)
        words += ["--sync", options.sync, "--data_dir", data, "--model_dir", saved]
        words += ["--max_seq_length", options.max_seq_length]
    for name in ("max_steps", "total_batch_size", "threads"):
        words += [f"--{name}", getattr(options, name)]
    script = "small_gpt.py" if model == GPT else "student.py"
    found: dict[str, list[dict[str, Any]]] = {PLAIN: [], AUDITED: []}
    for repeat in range(options.repeats):
        turns = [PLAIN, AUDITED]
        random.Random(repeat).shuffle(turns)
        for turn in turns:
            print(f"{model}, {ranks} ranks, repeat {repeat + 1} of {options.repeats}: {turn}", file=sys.stderr)
            found[turn].append(run(options.runs_dir / f"{turn}{repeat + 1}", words, ranks, turn == AUDITED, script))
    options.runs_dir = folder
    pairs = list(zip(found[PLAIN], found[AUDITED], strict=True))
    same = all(plain.pop("losses") == audited.pop("losses") for plain, audited in pairs)
    return {"model": model, "ranks": ranks, "same_losses": same, **found}


def run(folder: Path, words: list[Any], ranks: int, is_audited: bool, script: str) -> dict[str, Any]:
    """One run: seconds of its steps, peak memory of each rank, and what the audit told."""
    folder.mkdir()
    audit = ["-m", "cos598d", "audit", "--steps", EXAMINED, "--output_dir", folder / "audit"] if is_audited else []
    load = os.getloadavg()[0]
    peaks = student_ranks(folder, words, ranks, audit, script)
    of_rank = json.loads((folder / "rank0.json").read_text())
    facts = {
        "losses": of_rank["losses"],
        "close": statistics.median(of_rank["seconds"][1:EXAMINED]),
        "after": statistics.median(of_rank["seconds"][EXAMINED + 1 :]),
        "peak_megabytes": peaks,
        "load": load,
    }
    if is_audited:
        verdict = json.loads((folder / "audit" / "audit.json").read_text())
        facts["told"] = verdict["seen"]["own_share_after"]
    return facts


def row(facts: dict[str, Any]) -> list[str]:
    """A row of the table."""
    plain, audited = facts[PLAIN], facts[AUDITED]

    def median(runs: list[dict[str, Any]], name: str) -> str:
        values = [each[name] for each in runs]
        return f"{statistics.median(values):.4f} ({min(values):.4f}-{max(values):.4f})"

    more = [f"{b['after'] / a['after'] - 1:+.1%}" for a, b in zip(plain, audited, strict=True)]
    told = f"{statistics.fmean(each['told'] for each in audited):.1%}"
    memory = [f"{max(max(each['peak_megabytes']) for each in runs):.0f}" for runs in (plain, audited)]
    seconds = [median(plain, "after"), median(audited, "after")]
    load = (
        f"{min(each['load'] for each in (*plain, *audited)):.1f}-{max(each['load'] for each in (*plain, *audited)):.1f}"
    )
    return [
        facts["model"],
        str(facts["ranks"]),
        *seconds,
        ", ".join(more),
        told,
        median(audited, "close"),
        *memory,
        load,
    ]


if __name__ == "__main__":
    sys.exit(main())
