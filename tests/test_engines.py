"""Other libraries' engines through the door: each trains as one process does. Those not installed are left out.

Calls the loop, as tests of resuming do, since a program takes seconds.
"""

import contextlib

import pytest
from ranks import world
from training_cases import STEPS, train

from cos598d.errors import UsageError
from cos598d.sync import ENGINES, get_sync

PACKAGES = {"horovod": "horovod", "fabric": "lightning", "deepspeed": "deepspeed"}
CASES = {
    "torch_fsdp": {},
    "horovod": {},
    "fabric": {},
    "deepspeed": {"zero_stage": 1},
    "deepspeed, 2": {"zero_stage": 2},
    "deepspeed, 3": {"zero_stage": 3},
    "dp": {},
}


@pytest.fixture(scope="module")
def ranks():
    with world(2) as started:
        yield started


@pytest.fixture(scope="module")
def right(ranks):
    (found,) = ranks.run(train, "none", count=1)
    return found


def _train_and_resume(sync, folder, options):
    """A whole training; then one that begins with another sync, resumes with the engine, and ends with a sync."""
    whole = train(sync, options=options)
    other = "none" if sync == "dp" else "bucketed"
    train(other, folder=folder, save_at=(3,), steps=3)
    mine = train(sync, folder=folder, save_at=(4,), steps=4, options=options)
    return whole, mine, train(other, folder=folder)


@pytest.mark.parametrize("case", CASES)
def test_an_engine_trains_as_one_process_and_resumes_from_weights(ranks, right, tmp_path, case):
    sync = case.partition(",")[0]
    if sync in PACKAGES:
        pytest.importorskip(PACKAGES[sync])
    # DeepSpeed keeps the first process group that it has seen.
    with world(2) if sync == "deepspeed" else contextlib.nullcontext(ranks) as used:
        count = 1 if sync == "dp" else 2
        found = used.run(_train_and_resume, sync, str(tmp_path), CASES[case], count=count)
    for whole, mine, rest in found:
        assert whole["losses"] == pytest.approx(right["losses"], abs=1e-6)
        assert mine["losses"] == pytest.approx(right["losses"][3:4], abs=1e-6)
        assert ("starts from scratch" in mine["said"]) != get_sync(sync).keeps_optimizer_state
        # An optimizer that begins anew takes other steps, from the same weights.
        assert rest["losses"][0] == pytest.approx(right["losses"][4], abs=0.05)
        assert len(rest["losses"]) == STEPS - 4


def test_every_engine_has_a_case():
    assert {case.partition(",")[0] for case in CASES} == set(ENGINES)


def test_what_cannot_work_is_said_before_the_ranks_meet():
    with pytest.raises(UsageError, match="--world_size 1"):
        get_sync("dp").check_run(2, "fp32")
    pytest.importorskip("deepspeed")
    with pytest.raises(UsageError, match="--precision bf16 or fp32"):
        get_sync("deepspeed").check_run(2, "fp16")
