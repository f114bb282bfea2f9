"""How long does a student's script take for what the lessons do? Both in turn, on the same batches and weights.

    GLUE_DIR=... python benchmarks/beside_student.py --runs_dir runs/student [--repeats 3] [--precision bf16]

Each repeat runs every sync as `benchmarks/student.py` and as the project's own training, in another order each time,
on as many ranks with as many threads. An iteration's seconds are rank 0's, medians without the first two; a ratio is
taken within a repeat. --precision is ours alone: the student's script knows no other than fp32. It ends with 1 where
the losses show that the two did not do the same work.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


from cos598d.data import get_task
from cos598d.data.sampler import global_batches
from cos598d.models.build import build_model, find_model
from cos598d.models.checkpoint import save_model
from cos598d.records.conventions import PRECISIONS, WARM_UP
from cos598d.records.summary import mean_interval
from cos598d.terminal.children import end_all

SYNCS = ("gather_scatter", "all_reduce", "ddp")
SEED = 42
# Losses of the same work differ by rounding, which the steps before make larger.
SAME = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True, help="a new folder for the records")
    parser.add_argument("--sync", default=",".join(SYNCS), help=f"some of {','.join(SYNCS)}")
    options = parsed(parser)
    options.runs_dir.mkdir(parents=True)
    data, model, order = prepare(options)
    syncs = options.sync.split(",")
    found: dict[str, list[tuple[float, float]]] = {sync: [] for sync in syncs}
    apart = dict.fromkeys(syncs, 0.0)
    for repeat in range(options.repeats):
        turns = [(sync, who) for sync in syncs for who in (run_student, run_ours)]
        random.Random(repeat).shuffle(turns)
        results = {}
        for sync, who in turns:
            folder = options.runs_dir / f"repeat{repeat + 1}" / f"{sync}-{who.__name__.removeprefix('run_')}"
            folder.mkdir(parents=True)
            print(f"repeat {repeat + 1} of {options.repeats}: {folder.name}", file=sys.stderr, flush=True)
            results[sync, who] = who(options, sync, folder, data, model, order)
        for sync in syncs:
            (student_losses, student), (our_losses, ours) = results[sync, run_student], results[sync, run_ours]
            apart[sync] = max(apart[sync], *(abs(a - b) for a, b in zip(student_losses, our_losses, strict=True)))
            found[sync].append((statistics.median(student[WARM_UP:]), statistics.median(ours[WARM_UP:])))
    print("sync            student s/it    ours s/it    student / ours, by repeat    mean (95 %)    losses apart")
    for sync, pairs in found.items():
        student, ours = (statistics.fmean(values) for values in zip(*pairs))
        ratios = [a / b for a, b in pairs]
        interval = " ({:.2f}-{:.2f})".format(*mean_interval(ratios)) if len(ratios) > 1 else ""
        by_repeat, mean = ", ".join(f"{ratio:.2f}" for ratio in ratios), f"{statistics.fmean(ratios):.2f}{interval}"
        print(f"{sync:15} {student:.3f}           {ours:.3f}        {by_repeat}    {mean}    {apart[sync]:.1e}")
    different = [sync for sync in syncs if not apart[sync] <= SAME]
    if different:
        print(f"not the same work: the losses of {', '.join(different)} are more than {SAME:g} apart.")
    return 1 if different else 0


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of `parser`, and those of the work that ours and another program do in turn."""
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=12)
    parser.add_argument("--world_size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--total_batch_size", type=int, default=64, help="a multiple of --world_size")
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--model", default="minilm", help="as --model_name_or_path (default: minilm)")
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS, help="what ours computes in (default: fp32)")
    options = parser.parse_args()
    if options.total_batch_size % options.world_size:
        parser.error("--total_batch_size must be a multiple of --world_size: else a mean of means is none of all")
    if options.max_steps <= WARM_UP:
        parser.error(f"--max_steps must be more than {WARM_UP}, which are left out")
    return options


def prepare(options: argparse.Namespace) -> tuple[Path, Path, Path]:
    """The folders of data and model that both take, and the file with every batch's examples."""
    if os.environ.get("GLUE_DIR"):
        data = Path(os.environ["GLUE_DIR"]).resolve() / "RTE"
    else:
        data = (options.runs_dir / "sample").resolve()
        subprocess.run([sys.executable, "-m", "cos598d", "sample", str(data)], check=True, env=environment())
    task, source = get_task("rte"), find_model(options.model)
    folder = (options.runs_dir / "model").resolve()
    save_model(folder, build_model(source, task.head, task.num_labels, 0.0, SEED), source.encoder)
    examples = len((data / "train.tsv").read_text(encoding="utf-8").splitlines()) - 1
    batches: list[list[int]] = []
    epoch = 0
    while len(batches) < options.max_steps:
        batches += [batch.tolist() for batch in global_batches(examples, options.total_batch_size, SEED, epoch)]
        epoch += 1
    if any(len(batch) % options.world_size for batch in batches[: options.max_steps]):
        raise SystemExit("an epoch's last batch does not divide by the ranks: lower --max_steps or --world_size.")
    order = (options.runs_dir / "order.json").resolve()
    order.write_text(json.dumps(batches[: options.max_steps]))
    return data, folder, order


def run_student(
    options: argparse.Namespace, sync: str, folder: Path, data: Path, model: Path, order: Path
) -> tuple[list[float], list[float]]:
    """The global batch's losses and rank 0's seconds, by the student's script."""
    words = ["--sync", sync, "--data_dir", data, "--model_dir", model, "--order", order, "--seed", SEED]
    words += ["--max_seq_length", options.max_seq_length, "--max_steps", options.max_steps]
    words += ["--threads", options.threads]
    words += ["--world_size", options.world_size, "--master_port", free_port()]
    command = [sys.executable, ROOT / "benchmarks" / "student.py", *words]
    return ranks_of(folder, options.world_size, lambda rank: [*command, "--rank", rank], lambda _: environment())


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ranks_of(
    folder: Path, ranks: int, command: Callable[[int], list[Any]], environ: Callable[[int], dict[str, str]]
) -> tuple[list[float], list[float]]:
    """Run a program as every rank; each writes its losses and seconds to the file that --output names, in `folder`.

    What it prints goes to rankR.txt there. Returns the means of the losses over the ranks, and rank 0's seconds.
    """
    started, outputs = [], [folder / f"rank{rank}.json" for rank in range(ranks)]
    try:
        for rank, output in enumerate(outputs):
            words = [*map(str, command(rank)), "--output", str(output)]
            with output.with_suffix(".txt").open("w") as said:
                started.append(subprocess.Popen(words, env=environ(rank), stdout=said, stderr=said))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"a rank of {folder} failed; what it printed is there.")
    finally:
        end_all(started, 0.0)
    found = [json.loads(output.read_text()) for output in outputs]
    losses = [statistics.fmean(of_ranks) for of_ranks in zip(*(rank["losses"] for rank in found), strict=True)]
    return losses, found[0]["seconds"]


def run_ours(
    options: argparse.Namespace, sync: str, folder: Path, data: Path, model: Path, order: Path
) -> tuple[list[float], list[float]]:
    """The same by the project's own loop, as a user starts it."""
    words = ["-m", "cos598d", "train", "--task_name", "RTE", "--sync", sync, "--world_size", options.world_size]
    words += ["--data_dir", data, "--model_name_or_path", model, "--do_lower_case", "--do_train", "--no_cuda"]
    words += ["--max_seq_length", options.max_seq_length, "--max_steps", options.max_steps, "--seed", SEED]
    words += ["--total_train_batch_size", options.total_batch_size, "--threads", options.threads]
    words += ["--learning_rate", "5e-5", "--precision", options.precision]
    words += ["--label", folder.name, "--output_dir", folder]
    done = subprocess.run([sys.executable, *map(str, words)], env=environment(), stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"the project's own training failed with {sync}; see its error above.")
    losses = json.loads((folder / "summary.json").read_text())["losses"]
    rows = [json.loads(line) for line in (folder / "iterations.rank0.jsonl").read_text().splitlines()]
    return losses, [row["seconds"] for row in rows]


def environment() -> dict[str, str]:
    """Where this project's code is found; torch's threads are each program's own matter."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
