"""DeepSpeed under audit: without ZeRO its gradients are judged, with it the audit names why they are not."""

from importlib.util import find_spec

import pytest
from audit_scripts import audit

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed. Run make engines")
SCRIPT = """import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
deepspeed.init_distributed("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
data, labels = torch.randn(120, 8), torch.randint(0, 3, (120,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
config = {{
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {{"stage": {stage}, "overlap_comm": False}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for step in range(4):
    batch = torch.arange(16 * step, 16 * step + 16)[{share}]
    engine.backward(nn.functional.cross_entropy(engine(data[batch]), labels[batch]))
    engine.step()
dist.destroy_process_group()
"""
# Stage of ZeRO and each rank's share of a batch -> the fault, if any, and why gradients are not judged.
WHY = "the optimizer does not step the tensors whose gradients were computed"
CASES = [(0, "rank::ranks", None), (1, "rank::ranks", None), (2, "rank::ranks", None), (3, "rank::ranks", None)]
CASES += [(2, ":8", "same_batches")]


@pytest.mark.long(one_in=4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "share", "fault"), CASES)
def test_deepspeeds_gradients_are_judged_without_zero_and_its_batches_always(stage, share, fault, tmp_path):
    codes, text, verdict = audit(tmp_path, SCRIPT.format(stage=stage, share=share), is_fresh=True)
    assert codes == [0, 0], text
    assert [each["name"] for each in verdict["faults"]] == ([fault] if fault else []), text
    assert ("No fault found" in text) == (stage == 0), text
    assert fault or ("NOT JUDGED" in text) == (stage > 0), text
    assert fault or stage == 0 or any(WHY in each for each in verdict["not_judged"]), text
