"""The cost of recording: seconds to enter, sum and write one iteration's rows, by the number of tensors.

    python benchmarks/recording.py [--tensors 201] [--iterations 200] [--monitor_interval 1]

Compare it with the seconds of an iteration in a run's summary.json.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cos598d.comm.ledger import Row
from cos598d.measure.monitor import Monitor
from cos598d.measure.record import RunRecord
from cos598d.measure.wire import Interface
from cos598d.records.conventions import GRADIENTS, PHASES
from cos598d.world.network import interface_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=201, help="collective calls per iteration (BERT-base: 201)")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--monitor_interval", type=float, default=1.0, help="as a run's; 0: no samples (default: 1)")
    options = parser.parse_args()
    seconds, wire = [], []
    monitor = None
    if options.monitor_interval:
        loopback = Interface(interface_of("127.0.0.1"), (0,))
        monitor = Monitor(options.monitor_interval, loopback, torch.device("cpu"), print)
        take = monitor.end_iteration

        def timed(iteration: int):
            started = time.perf_counter()
            counted = take(iteration)
            wire.append(time.perf_counter() - started)
            return counted

        monitor.end_iteration = timed
    with tempfile.TemporaryDirectory() as folder, RunRecord(Path(folder), 0, monitor) as record:
        record.begin_training()
        for iteration in range(1, options.iterations + 1):
            started = time.perf_counter()
            for tensor in range(options.tensors):
                name = f"bert.encoder.layer.{tensor}.attention.output.dense.weight"
                shape = (768, 768)
                record.ledger.enter(
                    Row(iteration, GRADIENTS, "all_reduce", name, shape, "float32", 2359296, 3538944, 3538944, 0.01)
                )
            facts = {"iteration": iteration, "epoch": 1, "loss": 0.7, "learning_rate": 5e-5, "examples": 64}
            record.iteration(facts, 1.0, dict.fromkeys(PHASES, 0.1))
            seconds.append(time.perf_counter() - started)
    median, worst = statistics.median(seconds), max(seconds)
    print(f"{options.tensors} rows per iteration: median {1000 * median:.2f} ms, worst {1000 * worst:.2f} ms")
    if wire:
        median, worst = statistics.median(wire), max(wire)
        print(f"of which a sample of the wire: median {1000 * median:.2f} ms, worst {1000 * worst:.2f} ms")


if __name__ == "__main__":
    main()
