"""Records of runs that never ran, written by RunRecord itself, rank after rank in one process."""

import json
import os
from pathlib import Path

from cos598d.comm.ledger import Row
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import PHASES

SETTING = {
    "task": "rte",
    "model": "tiny",
    "data": "a sample",
    "precision": "fp32",
    "sync": "all_reduce",
    "dropout": 0.0,
    "total_train_batch_size": 16,
    "max_seq_length": 32,
    "seed": 42,
    "world_size": 1,
    "label": "train",
}
EPOCH = 6  # iterations
host = [128.0]  # the host's clock, which every iteration moves by its seconds


def begin(folder, ranks=1, positions=None, **more):
    """The records of all ranks, opened."""
    folder.mkdir(exist_ok=True)
    records = [RunRecord(folder, rank, world_size=ranks, resume=positions, **more) for rank in range(ranks)]
    return [record.__enter__() for record in records]


def iterate(record, first, last, epoch=EPOCH):
    """Iterations of a few calls, with seconds that no two share; each `epoch` of them ends with an evaluation."""
    for iteration in range(first, last + 1):
        record.begin_training()
        record.ledger.begin(iteration, 0.0)
        for place in range(2 + iteration % 2):
            sent, name = 7 + iteration + record.rank, f"bucket {place}"
            call = ("gradients", "all_reduce", name, (10,), "float32", 40, sent, 5, 0.1)
            record.ledger.enter(Row(iteration, *call, started=0.2))
        record.ledger.enter(Row(iteration, "loss", "all_reduce", "loss", (), "float64", 8, 8, 8, 0.001, started=0.3))
        seconds = (100 + 3 * iteration) / 1024  # of which sums and differences are exact
        host[0] += seconds + (iteration % 3) / 1024
        number = 1 + (iteration - 1) // epoch
        facts = {"iteration": iteration, "epoch": number, "loss": 1 / (3 + iteration), "examples": 16}
        facts |= {"learning_rate": 0.1, "spans_seconds": [["backward", 0.0, 0.05]]}
        record.iteration(facts, seconds, {phase: seconds / (3 + place) for place, phase in enumerate(PHASES)})
        if iteration % epoch == 0:
            record.ledger.enter(Row(iteration, "gradients", "broadcast", "settled", (10,), "float32", 40, 3, 3, 0.1))
            record.pause_training()
            host[0] += 5.0
            record.epoch({"epoch": number, "iterations": epoch, "loss": 0.5, "acc": 0.5 + number / 10})
        elif iteration % epoch == 4:
            record.pause_training()
            record.evaluation({"iteration": iteration, "epoch": number, "validation_loss": 1 / iteration})


def add_iteration(record, iteration, epoch=1, seconds=0.1, counts=None):
    """One iteration of 8 examples without calls."""
    facts = {"iteration": iteration, "epoch": epoch, "loss": 0.5, "examples": 8}
    record.iteration(facts, seconds, dict.fromkeys(PHASES, 0.0), counts)


def finish(records, setting=SETTING, others=None):
    """What the end of a run does, for all its ranks."""
    shares = [json.loads(json.dumps(record.share())) for record in records]
    for record in records:
        record.complete()
    records[0].stage(setting, shares, others or {})
    records[0].remove_old(with_model=False)
    for record in records[1:] + records[:1]:
        record.publish()
    records[0].publish_summary()
    for record in records:
        record.__exit__(None, None, None)


def left_alone(records):
    """As kill -9 leaves them: nobody writes down what ended the run."""
    for record in records:
        for file in record._files.by_name.values():
            os.close(file._descriptor)
            file._descriptor = -1


def rows_of(path):
    """The rows of a file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def summary_of(folder):
    """The summary of a run."""
    return json.loads((folder / "summary.json").read_text())
