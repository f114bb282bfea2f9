"""What recording costs: seconds to enter, sum and write one iteration's rows, for a model of a given number of tensors.

    python benchmarks/recording.py [--tensors 201] [--iterations 200]

Set it beside the seconds of an iteration in a run's summary.json.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cos598d.measure.clock import PHASES
from cos598d.measure.ledger import GRADIENTS, Row
from cos598d.measure.record import RunRecord


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=201, help="collective calls an iteration (BERT-base: 201)")
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()
    seconds = []
    with tempfile.TemporaryDirectory() as folder, RunRecord(Path(folder), 0) as record:
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
    print(f"{options.tensors} rows an iteration: median {1000 * median:.2f} ms, worst {1000 * worst:.2f} ms")


if __name__ == "__main__":
    main()
