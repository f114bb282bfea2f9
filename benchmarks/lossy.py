"""Lossy syncs' effect on the metric, and their savings on a slow link: a table of RTE and SQuAD over several seeds.

    GLUE_DIR=... SQUAD_DIR=... python benchmarks/lossy.py --runs_dir runs/lossy [--sync bucketed+powersgd,diloco+bf16]
        [--tasks RTE,SQuAD] [--seeds 3] [--questions 4370] [--rate 100mbit] [-- any other flag of a run]

For each task and sync there is a training on 4 local ranks with each seed. Its metric after the last epoch, on the
whole dev set, is compared with that of `bucketed`, which is exact, with the same seeds. The table has the mean, its
standard error over the seeds, and the difference with the standard error of both. Then some steps of each sync, and of
DDP, run on 4 emulated hosts whose links have that rate (Linux, root, iproute2). The table has the mean seconds per
step, since some do not send in every step, and the MB that a rank sends per step. Runs are in the folder one by one,
and existing ones are reused. So the same command continues where it was stopped.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from made import make_run

from cos598d.commands.flags import to_words
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.records.conventions import COMMUNICATION, GRADIENTS
from cos598d.records.run import CALL, read_table
from cos598d.terminal.files import write_json
from cos598d.terminal.tables import as_text
from cos598d.tools.bench.candidates import parse_candidate, read_candidate
from cos598d.tools.report.load import load_run

EXACT, DDP, RANKS = "bucketed", "ddp", 4
SYNCS = (
    "sparse_rows+bf16,sparse_rows+int8,sparse_rows+powersgd,sparse_rows+topk,bucketed+powersgd,bucketed+topk,"
    "local_sgd:sync_every=16,diloco,diloco+bf16,diloco+int8"
)
# The metric, and the flags of a training.
TASKS = {
    "RTE": ("acc", {"task_name": "RTE", "num_train_epochs": 4, "total_train_batch_size": 32, "learning_rate": 1e-4}),
    "SQuAD": (
        "f1",
        {"task_name": "SQuAD", "num_train_epochs": 2, "total_train_batch_size": 16, "learning_rate": 1e-4,
         "max_seq_length": 256},
    ),
}  # fmt: skip
LINE = {"task_name": "RTE", "total_train_batch_size": 16, "max_seq_length": 64}
HEAD = ("sync", "seeds", "metric", "less exact's", "s a step", "of DDP's", "MB a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--sync", default=SYNCS, help="which, separated by commas, as the bench names them")
    parser.add_argument("--tasks", default=",".join(TASKS), help="RTE, SQuAD or both; none: only the line")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=4370, help="of SQuAD's that are trained on")
    parser.add_argument("--rate", default="100mbit", help="of the emulated links; none: only the metrics")
    parser.add_argument("--line_steps", type=int, default=34, help="steps on them, of which the first two do not count")
    parser.add_argument("flags", nargs="*", help="any other flags of a run, after --")
    options = parser.parse_args()
    words = list(dict.fromkeys([EXACT, *filter(None, options.sync.split(","))]))
    tasks = [] if options.tasks == "none" else options.tasks.split(",")
    for word in words:
        parse_candidate(word)
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"--tasks {task}: the known ones are {', '.join(TASKS)}, or none.")
    line = {} if options.rate == "none" else {word: on_the_line(options, word) for word in [DDP, *words]}
    found = {}
    for task in tasks:
        by_sync = {word: metrics_of(options, task, word) for word in words}
        found[task] = {word: row(values, by_sync[EXACT]) for word, values in by_sync.items()}
        print(f"\n{task}, {TASKS[task][0]}; {options.rate}\n{table(found[task], line)}", flush=True)
    if not tasks:
        print(f"\n{options.rate}\n{table({word: [] for word in words}, line)}")
    known = {task: {word: list(map(or_none, values)) for word, values in rows.items()} for task, rows in found.items()}
    write_json(options.runs_dir / "lossy.json", {"metrics": known, "line": line})


def metrics_of(options: argparse.Namespace, task: str, word: str) -> list[float]:
    """The metric of each seed's training."""
    metric, flags = TASKS[task]
    if task == "SQuAD":
        flags = flags | {"max_train_examples": options.questions}
    found = []
    for seed in range(42, 42 + options.seeds):
        name = f"{task}-{word.replace(':', '-')}-seed{seed}"
        train = ["train", "--do_train", "--do_eval", "--world_size", str(RANKS), "--seed", str(seed), "--no_save_model"]
        folder = run_of(options, name, train, word, flags)
        found.append(load_run(folder)["epochs"][-1][metric])
    return found


def on_the_line(options: argparse.Namespace, word: str) -> dict[str, float]:
    """Seconds per step on emulated hosts, and bytes that a rank sends per step, both averaged over the steps."""
    cluster = ["cluster", "run", "--name", f"lossy{os.getpid()}", "--hosts", str(RANKS), "--rate", options.rate, "--"]
    train = ["train", "--do_train", "--max_steps", str(options.line_steps), "--no_save_model"]
    name = f"{options.rate}-{word.replace(':', '-')}"
    folder = run_of(options, name, [*cluster, sys.executable, "-m", "cos598d", *train], word, LINE)
    run = load_run(folder)
    sent = 0
    for rank in range(RANKS):
        for call in read_table(folder / COMMUNICATION.format(rank=rank), CALL):
            # The last step's calls include those that make the ranks' models equal after training.
            if call["purpose"] == GRADIENTS and call["iteration"] < run["iterations"]:
                sent += call["bytes_sent"]
    return {"seconds": run["seconds_per_iteration"]["mean"], "bytes": sent / RANKS / (run["iterations"] - 1)}


def run_of(options: argparse.Namespace, name: str, command: Sequence[str], word: str, flags: dict[str, object]) -> Path:
    """The folder of the run, which is made unless it exists. Raises UserError if it fails."""
    sync, values = read_candidate(word)
    own = to_words({"sync": sync, **values, **flags}, RunConfig)
    return make_run(options.runs_dir.resolve() / name, ["-m", "cos598d", *command, *own, *options.flags])


def row(values: Sequence[float], exact: Sequence[float]) -> list[float]:
    """Seeds, the mean and its standard error, the difference from exact's and the standard error of that."""
    error = standard_error(values)
    return [len(values), fmean(values), error, fmean(values) - fmean(exact), math.hypot(error, standard_error(exact))]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; NaN for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def or_none(value: float) -> float | None:
    """JSON has no NaN: a value that a single seed cannot have is null there."""
    return None if math.isnan(value) else value


def table(metrics: dict[str, list[float]], line: dict[str, dict[str, float]]) -> str:
    """A row per sync; what was not measured is left empty."""
    rows = [HEAD]
    for word in [DDP, *metrics]:
        cells = [word, "", "", ""]
        if metrics.get(word):
            count, mean, error, difference, both = metrics[word]
            cells = [word, f"{count:.0f}", f"{mean:.4f} ± {error:.4f}", f"{difference:+.4f} ± {both:.4f}"]
        if word in line:
            seconds, base = line[word]["seconds"], line[DDP]["seconds"]
            cells += [f"{seconds:.3f}", f"{seconds / base:.3f}", f"{line[word]['bytes'] / 1e6:.2f}"]
        rows.append(cells + [""] * (len(HEAD) - len(cells)))
    return as_text(rows, numbers=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
