"""DeepSpeed under audit: without ZeRO its gradients are judged, with it the audit names why they are not."""

from importlib.util import find_spec

import pytest
from audits import audit

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
WHY = "the optimizer does not step the tensors whose gradients were computed"


@pytest.mark.long(one_in=4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_is_judged_without_zero_and_with_it_is_not_judged_in_a_sentence(stage, start, tmp_path):
    source = SCRIPT.format(stage=stage, share="rank::ranks")
    codes, text, verdict = audit(start, tmp_path, source, is_fresh=True)
    assert codes == [0, 0], text
    assert verdict["faults"] == [], text
    assert ("No fault found" in text, "NOT JUDGED" in text) == (stage == 0, stage > 0), text
    assert stage == 0 or any(WHY in each for each in verdict["not_judged"]), text


@pytest.mark.timeout(300)
def test_deepspeeds_batches_are_judged_with_zero_too(start, tmp_path):
    codes, text, verdict = audit(start, tmp_path, SCRIPT.format(stage=2, share=":8"), is_fresh=True)
    assert codes == [0, 0], text
    assert [each["name"] for each in verdict["faults"]] == ["same_batches"], text
