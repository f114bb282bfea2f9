"""The cost of a long run's record: simulated iterations through the real RunRecord, then its report.

    python benchmarks/long_record.py [--iterations 100000] [--tensors 200] [--ranks 1] [--ledger auto] [--keep FOLDER]

It prints the process's memory over time, the bytes on the disk by file, the seconds for recording an iteration, and
those of `cos598d report`. Every 100th iteration is followed by a checkpoint's requests.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cos598d.measure.thinning import AUTO

from cos598d.comm.ledger import Row
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import GRADIENTS, LOSS, PHASES
from cos598d.terminal.program import own_environment

EPOCHS = 20
SECONDS = 0.25  # of a simulated iteration, roughly
SETTING = {
    "task": "rte",
    "label": "long",
    "model": "simulated",
    "data": "simulated",
    "precision": "fp32",
    "sync": "all_reduce",
    "backend": "gloo",
    "device": "cpu",
    "total_train_batch_size": 64,
    "max_seq_length": 128,
    "dropout": 0.1,
    "seed": 42,
    "bytes_are_assumed": False,
    "bytes_from": "ledger",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=200, help="collective calls per iteration")
    parser.add_argument("--ranks", type=int, default=1, help="ranks whose rows are written, all by this process")
    parser.add_argument("--ledger", default=AUTO, help="as a run's")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the record in this new folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.keep or Path(place) / "long"
        folder.mkdir(parents=True)
        record(folder, options)
        files = sorted((path for path in folder.iterdir()), key=lambda path: -path.stat().st_size)
        for path in files:
            print(f"{path.stat().st_size / 1e6:9.1f} MB  {path.name}")
        print(f"{sum(path.stat().st_size for path in files) / 1e6:9.1f} MB  in all")
        words = [sys.executable, "-m", "cos598d", "report", str(folder), "-o", str(Path(place) / "report.html")]
        started = time.perf_counter()
        subprocess.run(words, env=own_environment(), cwd=ROOT, check=True)
        print(f"report: {time.perf_counter() - started:.1f} s")


def record(folder: Path, options: argparse.Namespace) -> None:
    """Write the record of a simulated run, one iteration of all ranks after the other."""
    ranks = [RunRecord(folder, rank, world_size=options.ranks, kept=options.ledger) for rank in range(options.ranks)]
    for one in ranks:
        one.__enter__()
    ranks[0].describe({"config.json": {}, "environment.json": {}}, SETTING | {"world_size": options.ranks})
    started, in_an_epoch = time.perf_counter(), -(-options.iterations // EPOCHS)
    for iteration in range(1, options.iterations + 1):
        epoch = (iteration - 1) // in_an_epoch + 1
        for one in ranks:
            iterate(one, iteration, epoch, options)
            if iteration % 100 == 0:
                one.position()
            if iteration % in_an_epoch == 0 or iteration == options.iterations:
                one.pause_training()
                loss = 0.3 + (epoch / EPOCHS - 0.4) ** 2
                ended = {"epoch": epoch, "iterations": in_an_epoch, "loss": 0.7 / epoch}
                one.epoch(ended | {"acc": 0.5 + 0.01 * epoch, "validation_loss": loss, "seconds_evaluation": 1.0})
        if iteration in (1000, options.iterations // 4, options.iterations // 2, options.iterations):
            print(
                f"after {iteration:7,} iterations: {psutil.Process().memory_info().rss / 1e6:.1f} MB of memory",
                flush=True,
            )
    spent = time.perf_counter() - started
    print(f"recording: {1000 * spent / options.iterations / options.ranks:.2f} ms per iteration and rank")
    shares = [one.share() for one in ranks]
    for one in ranks:
        one.complete()
    ranks[0].stage(SETTING | {"world_size": options.ranks}, shares, {"config.json": {}, "environment.json": {}})
    for one in ranks[1:] + ranks[:1]:
        one.publish()
    ranks[0].publish_summary()
    print(f"after the summary: {psutil.Process().memory_info().rss / 1e6:.1f} MB of memory")
    for one in ranks:
        one.__exit__(None, None, None)


def iterate(one: RunRecord, iteration: int, epoch: int, options: argparse.Namespace) -> None:
    """One iteration of one rank."""
    one.begin_training()
    one.ledger.begin(iteration, 0.0)
    seconds = SECONDS * (1 + (iteration * 7919 % 1000) / 5000)
    for tensor in range(options.tensors):
        name, began = f"bert.encoder.layer.{tensor // 16}.attention.output.dense{tensor % 16}.weight", 0.5 * seconds
        times = {"seconds": 0.000812345 + tensor / 1e6, "started": began + 0.4 * seconds * tensor / options.tensors}
        one.ledger.enter(
            Row(iteration, GRADIENTS, "all_reduce", name, (768, 768), "float32", 2359296, 3538944, 3538944, **times)
        )
    one.ledger.enter(Row(iteration, LOSS, "all_reduce", "loss", (), "float64", 8, 12, 12, 0.000123456, None, 0.4))
    parts = dict(zip(PHASES, (0.0123456789, 0.3, 0.45, 0.15, 0.02, 0.05, 0.001), strict=True))
    phases = {phase: part * seconds for phase, part in parts.items()}
    begins = [sum(list(phases.values())[:place]) for place in range(len(PHASES))]
    facts = {
        "iteration": iteration,
        "loss": 0.7 / epoch * (1 + (iteration * 104729 % 997) / 4000),
        "tokens_padded": 64 * 128,
        "spans_seconds": [(phase, begin, phases[phase]) for phase, begin in zip(PHASES, begins, strict=True)] * 2,
        "epoch": epoch,
        "learning_rate": 5e-5 * (1 - iteration / (options.iterations + 1)),
        "examples": 64,
    }
    one.iteration(facts, seconds, phases)


if __name__ == "__main__":
    main()
