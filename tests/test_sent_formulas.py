"""What the ledger has of a step is what each strategy's formula says beforehand, on 2 and 4 ranks, to the byte."""

import pytest
from held import KINDS, SMALL, all_sent, cases_of
from lives import live
from worlds import run_ranks

from cos598d.comm.communicator import Communicator
from cos598d.strategies import get_strategy, known_names
from cos598d.strategies.formula import TrainingSpec
from cos598d.sync import SYNCS
from cos598d.sync.options import SyncOptions

# What travels only a step tells, or differs from step to step.
UNKNOWN_BEFORE = ("sparse_rows", "diloco")
# Which send nothing where all ranks share a host.
SILENT = ("none", "dp", "shared_memory", "hierarchical", "shared_weights")
OPTIONS = {
    **{name: ({},) for name in SYNCS if name not in UNKNOWN_BEFORE},
    **dict.fromkeys(("bucketed", "zero1", "sparse_zero1", "zero2", "zero3", "shared_weights"), ({}, SMALL)),
    "local_sgd": ({},),
    "ddp": ({}, SMALL, {"compress": "fp16"}, {"ddp_hook": "fp16"}),
    "bucketed, codecs": tuple(
        {"compress": word, **SMALL} for word in ("bf16", "int8", "topk", "topk:0.3", "powersgd", "powersgd:1")
    ),
    "ring, codecs": tuple({"compress": word} for word in ("fp16", "int8", "powersgd:2")),
    **{
        f"{name}, codecs": ({"compress": "bf16"}, {"compress": "topk"}) for name in ("flat", "tree", "halving_doubling")
    },
    "sparse_zero1, packed": ({"pack_gradients": True}, {"pack_gradients": True, **SMALL}),
    "sparse_rows, codecs": tuple({"compress": word, **SMALL} for word in ("int8", "powersgd:1")),
    "torch_zero1": ({},),
    "torch_fsdp": ({}, {"reshard": "no"}, {"reduce_scatter": "torch"}),
}


@pytest.mark.parametrize("world_size", KINDS)
def test_counted_is_what_the_formula_says(world_size):
    cases = cases_of(OPTIONS, world_size)
    for rank in run_ranks(world_size, all_sent, cases, seconds=240):
        for case, (counted, stated, (calls, calls_stated), unsaid) in zip(cases, rank, strict=True):
            assert unsaid == ""
            # torch's buckets are laid as gradients arrive: their sizes may round otherwise.
            near = calls if case.sync in ("ddp", "torch_zero1") else 0
            # A layer that is called twice, as one of the toy's, is gathered once more.
            often = 0.02 if (case.sync, case.model) in (("zero3", "toy"), ("torch_fsdp", "toy")) else 0
            assert counted == [pytest.approx(number, abs=near, rel=often) for number in stated], case
            if case.sync not in ("ddp", "torch_zero1", "torch_fsdp") and not often:  # torch's calls are its own affair
                assert calls == calls_stated, case


@pytest.mark.parametrize("name", known_names())
def test_every_strategy_states_it_or_says_why_not(name):
    """From shapes alone, for any number of ranks, before anybody has attached anything; one rank sends nothing."""
    import torch
    from held import Uneven

    strategy = get_strategy(name)(Communicator(None, "gloo", torch.device("cpu")), False, SyncOptions(), "fp32")
    for ranks in (1, 3, 64):
        found = strategy.expected_sent(TrainingSpec(Uneven(), ranks, ranks - 1, 2, 4))
        sends = found.synchronizing > 0 or bool(found.unsaid) or name in SILENT
        assert sends == (ranks > 1) or name in SILENT


RECORDED = {
    **{name: ({},) for name in known_names() if name not in ("dp", "horovod", "deepspeed", "fabric")},
    "diloco": ({"sync_every": 1, "fragments": 2}, {"sync_every": 2, "fragments": 2, "compress": "bf16"}),
    "local_sgd": ({"sync_every": 3},),
    "bucketed": ({}, {"compress": "topk:0.1"}, {"ledger": "every:1"}),
    "ddp": ({"compress": "fp16"},),
}


def recorded(comm, folder):
    """On a rank: under each strategy, where a run's rows, log and sums do not agree, and what it has sent."""
    short = {"max_train_examples": 24, "max_steps": 5, "eval_steps": 2, "save_steps": 3, "dropout": 0.0}
    found = {}
    for name, several in RECORDED.items():
        for place, own in enumerate(several):
            run = live(comm, f"{folder}/{name}{place}", short | own | {"sync": name})
            found[f"{name} {own}"] = [run["disagree"], run["sent"]]
    return found


def test_a_record_has_the_same_bytes_in_its_iterations_its_log_and_its_sums(tmp_path):
    """With averages under way at a checkpoint, at an evaluation, at the end of an epoch and of the run."""
    for rank in run_ranks(2, recorded, str(tmp_path)):
        assert {case: disagree for case, (disagree, _) in rank.items() if disagree} == {}
        assert {case.split()[0] for case, (_, sent) in rank.items() if not sent} <= set(SILENT)


def test_a_hook_that_changes_the_algorithm_later_is_not_stated():
    import torch
    from held import Uneven

    for hook in ("powersgd", "post_localsgd"):
        alone = Communicator(None, "gloo", torch.device("cpu"))
        strategy = get_strategy("ddp")(alone, False, SyncOptions(ddp_hook=hook), "fp32")
        assert "only the step tells" in strategy.expected_sent(TrainingSpec(Uneven(), 2, 0, 2)).unsaid
