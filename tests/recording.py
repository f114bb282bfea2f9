"""A run that is recorded as the trainer does it: real ranks and calls, and a loss that is known beforehand.

`tests/ranks.py` runs these functions on ranks.
"""

import json
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from worlds import Meeting

from cos598d.measure.clock import IterationClock
from cos598d.measure.monitor import Monitor
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import EVALUATION, LOSS

SETTING = {
    "task": "rte", "model": "tiny", "data": "a sample", "precision": "fp32", "sync": "all_reduce", "dropout": None,
    "total_train_batch_size": 4, "max_seq_length": 8, "seed": 1, "label": "train",
}  # fmt: skip
EPOCH = 5  # iterations
NUMBERS = 1 << 15  # of the gradient, 4 bytes each


class Stopped(Exception):
    """The run stops here."""


def record_run(folder, until, at=None, stops_after=None, board=None, counts=True, files=None):
    """Train to iteration `until`, from the start or from the checkpoint after iteration `at`, and finish.

    stops_after: raise Stopped after that iteration instead, without a word more than a killed process writes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    monitor = Monitor(0.02, counts, torch.device("cpu"), print)
    record = RunRecord(Path(folder), rank, monitor, board, world_size=size, resume_at=at)
    gradient, clock = torch.ones(NUMBERS), IterationClock(torch.device("cpu"))
    setting = SETTING | {"world_size": size}
    with suppress(Stopped), record:
        with record.ledger:
            dist.barrier()
            ledger = record.ledger
            if rank == 0:
                record.describe({"config.json": {"sync": "all_reduce"}}, setting)
            for iteration in range((at or 0) + 1, until + 1):
                record.begin_iteration()
                clock.start()
                ledger.begin(iteration, clock.started)
                with clock.phase("forward"):
                    pass
                with clock.phase("backward"), ledger.naming("layer.weight"):
                    dist.all_reduce(gradient)
                    gradient /= size
                with clock.phase("sync"), ledger.naming("loss", LOSS):
                    dist.all_reduce(torch.ones(1, dtype=torch.float64))
                seconds = clock.stop()
                facts = {"iteration": iteration, "loss": 1 / iteration, "epoch": 1 + (iteration - 1) // EPOCH}
                facts |= {"learning_rate": 0.1, "examples": 4, "spans_seconds": clock.spans}
                record.iteration(facts, seconds, clock.phases, {"tokens": 32})
                if iteration % EPOCH == 0:
                    record.begin_training()
                    with ledger.naming("layer.weight"):  # a sync that settles its weights
                        dist.all_reduce(torch.ones(1024))
                    dist.barrier()
                    record.pause_training()
                    with ledger.naming("outputs", EVALUATION):
                        dist.all_reduce(torch.ones(7))
                    record.epoch({"epoch": facts["epoch"], "iterations": EPOCH, "loss": 0.5, "acc": 0.75})
                if iteration == stops_after:
                    record.write_last()
                    record._end = lambda why: None  # a process that is killed does not say so
                    raise Stopped
        record.finish(Meeting(), setting, files or {})


def rows_of(folder, name, rank=0):
    """A file's rows, read by nothing of ours."""
    path = Path(folder) / name.format(rank=rank)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def alone(function, *arguments, **keywords):
    """Call a function in a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(*arguments, **keywords)
    finally:
        dist.destroy_process_group()
