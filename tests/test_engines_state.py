"""A resumed engine is the same to the last bit, and its state moves to and from other strategies."""

from dataclasses import replace

import pytest
from states import BUCKETS, Case, Training, wholes
from test_engines import skip_unless_installed
from test_state import compare
from test_state_moves import digests, pass_on, train_and_save
from worlds import run_ranks

PACKAGES = {"deepspeed": "deepspeed", "horovod": "horovod", "fabric": "lightning"}
ENGINES = [
    Case("torch_zero1", {}, "layers"),
    Case("torch_zero1", {}, "plain"),
    Case("torch_fsdp", {}, "layers"),
    Case("torch_fsdp", {}, "layers", "momentum"),
    Case("torch_fsdp", {"reshard": "no", "reduce_scatter": "torch"}, "layers", precision="fp16"),
    *(Case("deepspeed", {"zero_stage": stage}, "layers") for stage in range(4)),
    Case("deepspeed", {"zero_stage": 2}, "layers", "momentum"),
    Case("deepspeed", {"zero_stage": 3}, "layers", precision="bf16"),
    Case("horovod", {}, "layers"),
    Case("fabric", {}, "layers"),
    Case("fabric", {}, "plain"),
    Case("fabric", {"fabric_strategy": "fsdp2"}, "layers"),
]
# One of each way to hold a state, which loads the others'.
HOLDERS = [case for case in ENGINES if (case.optimizer, case.model, case.precision) == ("adamw", "layers", "fp32")]
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
OURS = [Case("all_reduce", {}, "layers"), Case("zero1", BUCKETS, "layers"), Case("zero3", BUCKETS, "layers")]


def installed(cases):
    """Those whose package is there; the test is skipped if none is."""
    for case in cases:
        skip_unless_installed(PACKAGES.get(case.sync, "torch"))
    return cases


@pytest.mark.long(one_in=5)
@pytest.mark.parametrize("sync", sorted({case.sync for case in ENGINES}))
def test_an_engine_resumes_to_the_last_bit(tmp_path, sync):
    # Horovod's thread adds up what has come together in time: with three ranks in another order each time.
    cases = installed([case for case in ENGINES if case.sync == sync])
    wrong = compare(tmp_path, cases, ranks=2 if sync == "horovod" else 3, seconds=200)
    if sync == "deepspeed":  # stage 3 learns anew in which order layers are called: the calls of a step are others
        wrong = {who: words for who, words in wrong.items() if words != ["rows"] or "zero_stage=3" not in who[0]}
    assert wrong == {}


@pytest.mark.long(one_in=5)
@pytest.mark.parametrize("sync", sorted({case.sync for case in HOLDERS}))
def test_states_move_from_and_to_an_engine_unchanged(tmp_path, sync):
    cases = installed([case for case in HOLDERS if case.sync == sync])
    for name in "abc":
        (tmp_path / name).mkdir()
    run_ranks(3, train_and_save, str(tmp_path / "a"), [*cases, *OURS], seconds=200)
    run_ranks(2, pass_on, str(tmp_path / "a"), str(tmp_path / "b"), cases, seconds=200)
    run_ranks(1, pass_on, str(tmp_path / "b"), str(tmp_path / "c"), OURS[:1])
    for later in ("b", "c"):
        for state in (tmp_path / later).iterdir():
            first, found = digests(tmp_path / "a" / state.name.split("-")[0]), digests(state)
            if sync == "deepspeed":  # it has one state for parameters side by side, used or not
                first, found = (
                    {k: v for k, v in each.items() if not k[1].startswith("never")} for each in (first, found)
                )
            assert found == first, state.name


def take_counts(comm, folder):
    """The counts of steps that stage 2 keeps of parameters that were stepped differently often, or never."""
    training = Training(comm, Case("deepspeed", {"zero_stage": 2}, "layers"))
    stepped = [whole for whole in wholes(folder) if not (whole.name.startswith("twice") and whole.kind in MOMENTS)]
    fewer = [replace(w, tensor=w.tensor - 2) if (w.kind, w.name[:5]) == ("step", "layer") else w for w in stepped]
    training.strategy.load_state(fewer)
    return {name: values.item() for kind, name, _, _, values in training.pieces() if kind == "step"}


def test_deepspeed_takes_the_largest_count_for_parameters_side_by_side(tmp_path):
    skip_unless_installed("deepspeed")
    run_ranks(2, train_and_save, str(tmp_path), OURS[:1])
    counts = {}
    for found in run_ranks(2, take_counts, str(tmp_path / "0")):
        counts |= found
    assert set(counts.values()) == {3.0}
    assert {"twice.weight", "never.bias", "layers.0.0.weight"} <= set(counts)
