"""`examples/from_scratch.py`, which imports nothing of ours: the same losses for every sync and number of ranks."""

import runpy

import pytest
import torch
import torch.distributed as dist
from programs import ROOT
from ranks import world

SCRIPT = ROOT / "examples" / "from_scratch.py"
SYNCS = ("gather_scatter", "all_reduce", "bucketed")


def losses():
    script, found = runpy.run_path(str(SCRIPT)), {}
    for sync in SYNCS:
        torch.manual_seed(dist.get_rank())  # the script itself sends rank 0's weights to the others
        model = script["Classifier"](32)
        torch.manual_seed(0)
        found[sync] = script["train"](model, sync, script["made_up_batches"](4, size=10), 0.05)
    return found


def test_losses_are_the_same_for_every_sync_and_number_of_ranks():
    with world(3) as ranks:
        (alone,) = ranks.run(losses, count=1)
        right = alone["gather_scatter"]
        assert right[-1] != pytest.approx(right[0], abs=1e-3)
        for found in (alone, *ranks.run(losses, count=2), *ranks.run(losses)):  # shares of 4, 3 and 3 examples
            assert found == {sync: pytest.approx(right, abs=2e-6) for sync in SYNCS}


@pytest.mark.long
def test_script_starts_under_torchrun_and_imports_nothing_of_ours(start):
    assert "cos598d" not in SCRIPT.read_text(encoding="utf-8")
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 150
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT), "--steps", "2"]
    program = start("torchrun", run, is_fresh=True)
    assert program.wait() == 0, program.text
    assert "step 2: loss" in program.text
