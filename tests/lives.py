"""Starts of a tiny run in the ranks of a test's world: whole, killed at some point, going on; and what each left."""

import contextlib
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from recorded import rows_of
from safetensors.torch import load_file

from cos598d import evaluate
from cos598d.attempt import train_and_checkpoint
from cos598d.checkpoints import FOLDER, Checkpoints, save, writer
from cos598d.checkpoints import folder as of_checkpoints
from cos598d.checkpoints.layout import step_name, steps
from cos598d.checkpoints.restore import open_checkpoint
from cos598d.checkpoints.resume import facts_of, find_checkpoint, open_record
from cos598d.config import RunConfig, recorded
from cos598d.evaluate import Evaluation
from cos598d.measure.clock import IterationClock
from cos598d.models.build import build_model, find_model
from cos598d.models.checkpoint import save_description
from cos598d.plan import Plan, TrainingSetup
from cos598d.records.conventions import OF_TRAINING, STATE, SYNCHRONIZING
from cos598d.records.figures import RankSums, epoch_traffic
from cos598d.strategies import get_strategy
from cos598d.strategies.replicas import digest
from cos598d.terminal.console import Console

# An epoch has 7 steps.
BASE = {
    "do_train": True, "do_eval": True, "total_train_batch_size": 8, "gradient_accumulation_steps": 2,
    "max_train_examples": 56, "max_eval_examples": 16, "per_gpu_eval_batch_size": 8, "max_seq_length": 24,
    "model_name_or_path": "tiny", "dropout": 0.1, "learning_rate": 1e-3, "warmup_steps": 2, "max_steps": 12,
    "save_steps": 4, "monitor_interval": 0.0,
}  # fmt: skip
PHASES = ("data", "forward", "backward", "sync", "clip", "step")
OF_A_SAVE = ("copy", "write", "manifest", "rename", "renamed", "prune")
ASKED = ("asked", "asked in the evaluation")


def live(comm, folder, values, fate=None, age=0.0):
    """One start of the run in `folder`, as `run` makes it, `age` seconds ago; what it came to on this rank.

    `fate` is a point of PHASES or OF_A_SAVE, an iteration, and the rank that is killed there; or one of ASKED and a
    rank that gets a SIGTERM then.
    """
    config = RunConfig(**{**BASE, "output_dir": str(folder), **values})
    if fate is not None and fate[2] == comm.rank:
        _arrange(*fate[:2], comm, Path(folder))
    task, source = config.task(), find_model("tiny")
    task.find(None)
    encoder = source.encoder
    model = build_model(source, task.head, task.num_labels, config.dropout, config.seed)
    torch.manual_seed(config.seed + comm.rank)
    train, dev = (
        task.load(part, encoder, config.max_seq_length, limit)
        for part, limit in (("train", config.max_train_examples), ("dev", config.max_eval_examples))
    )
    console = Lines(comm.rank == 0)
    facts = facts_of(config, Plan(config, len(train), comm.world_size), train, {"dev": dev}, source)
    found = find_checkpoint(Path(folder), config, facts, comm, console)
    strategy = get_strategy(config.sync)(comm, False, config.sync_options(), config.precision)
    evaluation = Evaluation(task, {"dev": dev}, model, comm, config.per_gpu_eval_batch_size, config.precision)
    with open_record(Path(folder), config, comm, found) as record:
        comm.ledger = record.ledger
        setup = TrainingSetup(config, comm, model, strategy, train, record, console)
        checkpoints = Checkpoints(
            Path(folder) / FOLDER,
            comm,
            config.keep,
            lambda place: save_description(place, model, encoder),
            {"sync": config.sync} | recorded(config.sync_options()),
            found,
            console.warn,
        )
        outcome = train_and_checkpoint(setup, evaluation, checkpoints, facts, time.monotonic() - age)
        share = record.share()
        return {
            "from": found.iteration if found else 0,
            "stopped": outcome.stopped,
            "saved": outcome.saved,
            "best": outcome.best,
            "losses": record.losses,
            "weights": {name: digest(tensor) for name, tensor in model.state_dict().items()},
            "epochs": [_without_times(row) for row in record.epochs],
            "totals": share["ledger"],
            "disagree": disagreements(Path(folder) / "live", comm.rank, share),
            "sent": sum(
                row["bytes_sent"] for row in rows_of(Path(folder) / "live" / f"iterations.rank{comm.rank}.jsonl")
            ),
            "calls": calls_of(Path(folder), comm.rank),
            "lines": console.lines,
        }


class Lines(Console):
    """Keeps what it is told to print."""

    def __init__(self, speaks):
        super().__init__("", speaks=False)
        self.lines, self._is_first = [], speaks

    def say(self, line):
        self.lines.append(line)

    warn = say


def disagreements(live_folder, rank, share):
    """Where a rank's rows of iterations, its log of calls and its sums do not have the same bytes; [] of nowhere.

    State that a checkpoint collects is in an iteration's row, unless an evaluation has been before the checkpoint.
    """
    rows, calls = (rows_of(live_folder / f"{name}.rank{rank}.jsonl") for name in ("iterations", "communication"))

    def sums(*purposes, **where):
        own = [call for call in calls if call["purpose"] in purposes and where.items() <= call.items()]
        return [len(own), sum(call["bytes_sent"] for call in own), sum(call["bytes_received"] for call in own)]

    found = []
    for row in rows:
        iteration = {"iteration": row["iteration"]}
        _, *moved = sums(*OF_TRAINING, **iteration)
        _, *with_state = sums(*OF_TRAINING, STATE, **iteration)
        synchronizing = [row["calls"], row["bytes_sent"], row["bytes_received"]]
        predicted = [row["predicted_bytes_sent"], row["predicted_bytes_received"]]
        if predicted not in (moved, with_state) or synchronizing != sums(*SYNCHRONIZING, **iteration):
            found.append([row["iteration"], predicted, moved, synchronizing, sums(*SYNCHRONIZING, **iteration)])
    totals = RankSums(share["sums"])
    for epoch in totals.table:
        sent = sum(row["predicted_bytes_sent"] for row in rows if row["epoch"] == int(epoch))
        (summed,) = epoch_traffic([totals], int(epoch))["predicted_bytes_sent"]
        if sent != summed:
            found.append([f"epoch {epoch}", sent, summed])
    for purpose, (count, _, sent, received) in share["ledger"]["by_purpose"].items():
        if sums(purpose) != [count, sent, received]:
            found.append([purpose, sums(purpose), [count, sent, received]])
    mean = sum(row["bytes_sent"] for row in rows) / len(rows)
    summed = totals.mean("bytes_sent")
    return found if mean == summed else [*found, ["mean", mean, summed]]


def calls_of(folder, rank):
    """A digest of a rank's calls in `live/`, without their times, by iteration; how many rows each had."""
    by_iteration = {}
    for row in rows_of(folder / "live" / f"communication.rank{rank}.jsonl"):
        by_iteration.setdefault(row["iteration"], []).append(_without_times(row))
    return {
        str(iteration): [len(calls), hashlib.sha256(json.dumps(calls).encode()).hexdigest()[:16]]
        for iteration, calls in by_iteration.items()
    }


def kept(folder, iteration):
    """Digests of all tensors of a checkpoint: weights, the optimizer's state, what each rank remembers."""
    (place,) = [place for number, place in steps(Path(folder) / "checkpoints") if number == iteration]
    files = sorted(place.rglob("*.safetensors"))
    return {(file.name, name): digest(tensor) for file in files for name, tensor in load_file(file).items()}


def checkpoints_in(folder):
    """The iterations of which there are checkpoints, in order."""
    return sorted(number for number, _ in steps(Path(folder) / "checkpoints"))


def all_whole(folder):
    """Whether every checkpoint that has its name is whole to the last byte."""
    return all(open_checkpoint(place) for _, place in steps(Path(folder) / "checkpoints"))


def _without_times(row):
    timed = ("started", "training", "seconds_evaluation")
    return {name: value for name, value in row.items() if name not in timed and not name.startswith("seconds")}


def _arrange(point, iteration, comm, folder):
    """Patch what makes this rank's process die, or be asked to end, at `point`."""
    if point == "asked in the evaluation":
        _before(evaluate, "evaluation_batches", lambda *_: comm.ledger.iteration == iteration, _ask)
    elif point in PHASES or point == "asked":
        phase = IterationClock.phase
        name, act = ("forward", _ask) if point == "asked" else (point, lambda: _die(comm, folder, iteration))

        @contextlib.contextmanager
        def fatal(clock, its):
            with phase(clock, its):
                if its == name and comm.ledger.iteration == iteration:
                    act()
                yield

        IterationClock.phase = fatal
    else:
        place, name, is_it = {
            "copy": (save, "take", lambda *_: comm.ledger.iteration == iteration),
            "write": (writer, "write_tensors", lambda path, *_: step_name(iteration) in str(path)),
            "manifest": (writer.Manifest, "text", lambda manifest: manifest.iteration == iteration),
            "rename": (writer, "take_name", lambda _, target, __: target.name == step_name(iteration)),
            "renamed": (writer, "prune", lambda _, manifest, *__: manifest.iteration == iteration),
            "prune": (of_checkpoints, "remove_known", lambda path, *_, **__: str(path).endswith("removed")),
        }[point]
        half = _half_written if point == "write" else None
        _before(place, name, is_it, lambda: _die(comm, folder, iteration), half)


def _before(place, name, is_it, act, instead=None):
    """Have `act` called before `place.name` is called with what `is_it`; `instead` is done first, in its place."""
    original = getattr(place, name)

    def patched(*arguments, **options):
        if is_it(*arguments, **options):
            if instead:
                instead(original, *arguments, **options)
            act()
        return original(*arguments, **options)

    setattr(place, name, patched)


def _half_written(write, path, *arguments):
    write(path, *arguments)
    os.truncate(path, path.stat().st_size // 2)


def _ask():
    os.kill(os.getpid(), signal.SIGTERM)


def _die(comm, folder, iteration):
    """Die by SIGKILL when what was saved before is whole: how long the disk takes is no matter of these tests."""
    deadline = time.monotonic() + 60
    before = (iteration - 1) // BASE["save_steps"] * BASE["save_steps"]
    while max([0, *checkpoints_in(folder)]) < before and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
