"""Replicas that differ end the run, named by rank and parameter. The exact syncs keep them equal to the bit."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from programs import TINY_TRAINING, free_port, script
from worlds import run_each, run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.errors import UsageError, UserError
from cos598d.loop import train
from cos598d.measure.record import RunRecord
from cos598d.plan import TrainingSetup
from cos598d.strategies.replicas import check_replicas, digest
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.codecs import CODECS
from cos598d.sync.options import SyncOptions
from cos598d.terminal.console import Console
from cos598d.tools.exam.models import toy_model
from toy_features import ToyFeatures


class Forgetful(AllReduce):
    """Forgets to average one small tensor in the third step, on every rank."""

    steps = 0

    def finish(self):
        self.steps += 1
        super().finish()

    def average(self, name, gradient):
        if (self.steps, name) != (3, "hidden.bias"):
            super().average(name, gradient)


def train_toy(comm, model, sync, evaluate=dict, **flags):
    """On a rank: a run of the training loop by SGD."""
    config = RunConfig(do_train=True, total_train_batch_size=8, optimizer="sgd", **flags)
    with tempfile.TemporaryDirectory() as folder, RunRecord(Path(folder), comm.rank) as record:
        console = Console("", speaks=False)
        train(TrainingSetup(config, comm, model, Replicated(sync), ToyFeatures(64), record, console), evaluate)


def train_forgetfully(comm, check_every):
    flags = {"num_train_epochs": 1, "learning_rate": 1e-3, "max_grad_norm": 0, "check_replicas": check_every}
    evaluated = []
    try:
        train_toy(comm, toy_model(0), Forgetful(comm), lambda: evaluated.append(1) or {}, **flags)
    except UserError as error:
        return [str(error), evaluated]
    return ["trained to the end", evaluated]


def test_a_gradient_that_was_not_averaged_once_ends_the_run_by_name():
    """It is the third step's; an epoch has eight."""
    for found, after in zip(run_each(3, train_forgetfully, [0, 2, 1]), (8, 4, 3), strict=True):
        (sentence, evaluated), *others = found
        assert others == [[sentence, evaluated]] * 2
        assert f"iteration {after}:" in sentence
        assert "rank 1's hidden.bias" in sentence
        assert "--check_replicas 1" in sentence
        assert evaluated == []


def bits_after_training(comm, kind):
    """On a rank: the digests of the weights after four steps of SGD with clipping by a sync and codec."""
    (name, word), model = kind, toy_model(comm.rank)
    flags = {"max_steps": 4, "learning_rate": 0.1, "max_grad_norm": 0.3, "momentum": 0.9}
    options = SyncOptions(compress=word, bucket_mb=0.5)
    train_toy(comm, model, get_sync(name)(comm, options=options), gradient_accumulation_steps=2, **flags)
    comm.ledger = Ledger()
    return [digest(tensor) for tensor in model.state_dict().values()]


EXACT = [(name, None) for name in SYNCS if name != "none"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_every_sync_and_codec_gives_all_ranks_the_same_bits(ranks):
    kinds = [*EXACT, *((sync, word) for sync in ("bucketed", "ring", "halving_doubling") for word in CODECS)]
    for kind, (bits, *others) in zip(kinds, run_each(ranks, bits_after_training, kinds), strict=True):
        assert len(set(bits)) > 3
        assert others == [bits] * (ranks - 1), kind


def compare_tensors(comm, offsets):
    """On a rank: the check's error and the second tensor, after it was off by `offsets[rank]` of its largest value."""
    second = torch.tensor([2.0, -4.0]) * (1 + offsets[comm.rank])
    tensors = [("first", torch.ones(3)), ("second", second), ("third", torch.tensor(7)), ("flag", torch.tensor(True))]
    try:
        check_replicas(comm, tensors, 5)
    except UserError as error:
        return [str(error), second.tolist()]
    return ["", second.tolist()]


# By how much each rank's second tensor is off, whose tensor the error names, and how far it is off.
TOO_FAR = [
    ([0.0, 2e-7, 1e-3], "rank 2's second", "up to 1.0e-03"),
    ([0.0, float("nan"), 0.0], "rank 1's second", "not finite"),
    ([float("inf"), 0.0, 0.0], "rank 1's second", "not finite"),
]


def compare_all(comm):
    """On a rank: the outcome of last bits, of each of TOO_FAR, and the calls of a check of equal models."""
    last_bits, *too_far = (compare_tensors(comm, each) for each in ([0.0, 2e-7, -3e-7], *(it[0] for it in TOO_FAR)))
    comm.ledger = Ledger()
    check_replicas(comm, toy_model(0).state_dict().items(), 1)
    return last_bits, [sentence for sentence, _ in too_far], len(comm.ledger.rows)


def test_a_check_corrects_last_bits_and_names_a_replica_that_is_further_off():
    """Ranks with other numbers of threads clip by a norm that was summed in another order."""
    by_rank = run_ranks(3, compare_all)
    for last_bits, sentences, calls in by_rank:
        assert last_bits == ["", [2.0, -4.0]]
        assert sentences == by_rank[0][1], "all ranks give the same error"
        assert calls == 0, "equal models send nothing"
    for sentence, (_, which, by) in zip(by_rank[0][1], TOO_FAR, strict=True):
        assert all(fact in sentence for fact in ("iteration 5:", which, by)), sentence


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="this processor has no vector instructions that could be left out",
)
def test_a_rank_whose_processor_rounds_differently_is_corrected(start, tmp_path):
    port, ranks = free_port(), []
    for rank in range(2):
        place = ["--master_port", port, "--world_size", 2, "--local_rank", rank]
        words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", 4, "--check_replicas", 1, *place]
        environ = {"ATEN_CPU_CAPABILITY": "default"} if rank else {}
        ranks.append(start(f"rank{rank}", [*words, "--output_dir", "out"], environ))
    for program in ranks:
        assert program.wait() == 0, program.text
    rows = [json.loads(line) for line in (tmp_path / "out" / "communication.rank0.jsonl").read_text().splitlines()]
    assert any(row["purpose"] == "state" and row["iteration"] > 0 for row in rows), "the ranks have parted in some bits"


def between_averages(comm):
    sync = get_sync("local_sgd")(comm, options=SyncOptions(sync_every=2))
    sync.attach(toy_model(0))
    found = [sync.replicas_equal]
    for _ in range(3):
        sync.after_step()
        found.append(sync.replicas_equal)
    sync.settle()
    return [*found, sync.replicas_equal, get_sync("none")(comm).replicas_equal]


def test_local_sgd_replicas_are_equal_only_after_an_average():
    for found in run_ranks(2, between_averages):
        assert found == [True, False, True, False, True, False]


def test_checking_replicas_without_a_sync_is_refused():
    with pytest.raises(UsageError, match="--check_replicas 5: with --sync none on 2 ranks the replicas drift"):
        RunConfig(sync="none", check_replicas=5, do_train=True).check(world_size=2)
    RunConfig(sync="none", check_replicas=5, do_train=True).check(world_size=1)
