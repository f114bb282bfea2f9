"""Other people's engines hold what their formulas give, on 2 ranks; test_formulas has our strategies."""

import pytest
from held import SMALL, Case, all_held
from test_engines import skip_unless_installed
from worlds import run_ranks

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


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_is_what_the_formula_gives(engine):
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
