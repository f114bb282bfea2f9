"""What is counted is what each strategy's formula says, on 2 and 4 ranks, for a toy and tiny BERT: to the byte between
two steps, and at the peak as near as gradients come in the order of their parameters."""

import pytest
from held import KINDS, SMALL, all_held, cases_of
from worlds import run_ranks

from cos598d.comm.communicator import Communicator
from cos598d.strategies import STRATEGIES, get_strategy, known_names
from cos598d.strategies.formula import TrainingSpec
from cos598d.sync.options import SyncOptions

OPTIONS = {
    **dict.fromkeys(("none", "all_reduce", "overlap", "flat", "ring", "tree", "torch_zero1", "torch_fsdp"), ({},)),
    **dict.fromkeys(("bucketed", "ddp", "zero1", "sparse_zero1", "zero2", "zero3", "shared_weights"), ({}, SMALL)),
    "sparse_zero1, packed": ({"pack_gradients": True}, {"pack_gradients": True, **SMALL}),
    "ddp, views": ({"bucket_view": True}, {"bucket_view": True, **SMALL}),
    "torch_fsdp, gathered once": ({"reshard": "no"},),
}


@pytest.mark.parametrize("world_size", KINDS)
def test_counted_is_what_the_formula_says(world_size):
    cases = cases_of(OPTIONS, world_size)
    for rank in run_ranks(world_size, all_held, cases, seconds=240):
        for case, (between, expected, peak, expected_peak, unsaid) in zip(cases, rank, strict=True):
            assert unsaid == ""
            assert between == expected, case
            whole = sum(peak.values())
            # The toy's modules are not registered as they are called: nearly as much may be held at another moment.
            near, same_moment = (1e-3, 1e-3) if case.model == "tiny" else (0.03, 0.15)
            assert sum(expected_peak.values()) == pytest.approx(whole, rel=near), (case, peak, expected_peak)
            for category, size in peak.items():
                assert expected_peak[category] == pytest.approx(size, abs=same_moment * whole), (case, peak)


@pytest.mark.parametrize("name", [*known_names(), "deepspeed:3"])
def test_every_strategy_states_both_or_says_why_not(name):
    """From shapes alone, for any number of ranks, before anybody has attached anything."""
    import torch
    from held import Uneven

    name, _, stage = name.partition(":")
    options = SyncOptions(zero_stage=int(stage or 1))
    strategy = get_strategy(name)(Communicator(None, "gloo", torch.device("cpu")), False, options, "fp32")
    for ranks in (1, 3, 64):
        found = strategy.expected_memory(TrainingSpec(Uneven(), ranks, ranks - 1, 2, 4))
        assert bool(found.unsaid) == (found.peak is None or "buckets" not in found.peak)
        if name in STRATEGIES:
            assert found.between_steps


def test_zero_divides_by_the_ranks_what_its_stages_cut():
    import torch
    from held import Uneven

    def held(name, ranks):
        strategy = get_strategy(name)(Communicator(None, "gloo", torch.device("cpu")), False, SyncOptions(), "fp32")
        return strategy.expected_memory(TrainingSpec(Uneven(), ranks, 0, 2)).between_steps

    for name, cut in (("zero1", ["optimizer"]), ("zero2", ["optimizer"]), ("zero3", ["optimizer", "parameters"])):
        one, many = held(name, 1), held(name, 8)
        for category in cut:
            assert many[category] < one[category] / (4 if category != "parameters" else 2), (name, category)
        assert bool(many["gradients"]) == (name == "zero1"), "the others have them from backward to the step"
