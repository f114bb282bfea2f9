"""What other people's engines hold is what their formulas say, and their formulas are the textbook's, on 2 ranks."""

import pytest
import torch
from held import Case, all_held
from test_engines import skip_unless_installed
from torch import nn
from worlds import run_ranks

from cos598d.comm.communicator import Communicator
from cos598d.strategies import get_strategy
from cos598d.strategies.formula import TrainingSpec
from cos598d.sync.options import SyncOptions

SMALL = {"bucket_mb": 0.01}  # of the toy's 45 kB several buckets, and some parameters larger than one
# The engine, the package that it needs, its options, and the categories whose peak its formula states.
STATES = ("parameters", "gradients", "optimizer")
ENGINES = {
    **{f"deepspeed {stage}": ("deepspeed", "deepspeed", {"zero_stage": stage}, ()) for stage in range(4)},
    **{
        f"deepspeed {stage}, small buckets": ("deepspeed", "deepspeed", {"zero_stage": stage, **SMALL}, ())
        for stage in range(1, 4)
    },
    "horovod": ("horovod", "horovod", {}, STATES),
    "fabric": ("fabric", "lightning", {}, (*STATES, "buckets")),
    "fabric fsdp2": ("fabric", "lightning", {"fabric_strategy": "fsdp2"}, (*STATES, "buckets")),
    "torch_fsdp, torch's reduce-scatter": ("torch_fsdp", "torch", {"reduce_scatter": "torch"}, (*STATES, "buckets")),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_counted_is_what_the_formula_says(engine):
    name, package, options, stated = ENGINES[engine]
    skip_unless_installed(package)
    cases = [Case(name, options, model, passes) for model, passes in (("toy", 1), ("toy", 2), ("tiny", 1))]
    for rank in run_ranks(2, all_held, cases, seconds=240):
        for case, (between, expected, peak, expected_peak, unsaid) in zip(cases, rank, strict=True):
            assert {category: between[category] for category in expected} == expected, case
            assert bool(unsaid) == (len(stated) < 4)
            assert sorted(expected_peak or ()) == sorted(stated), case
            whole = sum(peak[category] for category in stated)
            for category in stated:
                assert expected_peak[category] == pytest.approx(peak[category], abs=0.02 * whole), (case, peak)
            assert sum(peak.values()) >= sum(between.values()), case


# Of S bytes of weights, on one of n ranks: weights, gradients, AdamW's state.
TEXTBOOK = {
    "deepspeed 0": lambda n: (1, 0, 2),
    "deepspeed 1": lambda n: (1, 0, 3 / n),  # and the copy of its part that is stepped
    "deepspeed 2": lambda n: (1, 0, 3 / n),
    "deepspeed 3": lambda n: (1 / n, 1 / n, 2 / n),
    "fabric": lambda n: (1, 0, 2),
    "fabric fsdp2": lambda n: (1 / n, 0, 2 / n),
    "horovod": lambda n: (1, 0, 2),
}


@pytest.mark.parametrize("engine", TEXTBOOK)
def test_the_formula_is_the_textbook_s(engine):
    name, _, options, _ = ENGINES[engine]
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))
    for ranks in (1, 2, 8):
        comm = Communicator(None, "gloo", torch.device("cpu"))
        strategy = get_strategy(name)(comm, False, SyncOptions(**options), "fp32")
        found = strategy.expected_memory(TrainingSpec(model, ranks, 0, states=2)).between_steps
        expected = [share * 8 * 4 * 16 * 16 for share in TEXTBOOK[engine](ranks)]
        assert [found[category] for category in STATES] == expected, ranks
