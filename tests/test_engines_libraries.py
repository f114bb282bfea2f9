"""The examples in Lightning, Fabric, Accelerate and Hugging Face's Trainer: our losses are those of their own DDP."""

import os
import re
from importlib.util import find_spec

import pytest
from programs import ROOT, free_port

SECONDS = 240
NAMES = ["ddp", "ring", "zero1", "zero3", "shared_weights"]  # the library's own, and ours: averages and shards
# The example, the package that it needs, and whether torchrun starts its ranks.
EXAMPLES = {
    "fabric_strategy.py": ("lightning", False),
    "lightning_strategy.py": ("lightning", False),
    "accelerate_sync.py": ("accelerate", True),
    "trainer_sync.py": ("transformers", True),
}


@pytest.mark.long(one_in=4)
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("example", EXAMPLES)
def test_ten_steps_have_the_losses_of_the_librarys_own_ddp(example, start):
    package, by_torchrun = EXAMPLES[example]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed. Run make engines")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    file = ROOT / "examples" / example
    port = ["--master_port", str(free_port())]
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", *port] if by_torchrun else []
    program = start(example, [*words, file, *NAMES], environ)
    assert program.wait(SECONDS) == 0, program.text
    found = {
        name: list(map(float, said.split())) for name, said in re.findall(r"^(\w+): ([\d. ]+)$", program.text, re.M)
    }
    assert [len(found.get(name, ())) for name in NAMES] == [10] * len(NAMES), program.text
    for name in NAMES[1:]:
        assert found[name] == pytest.approx(found["ddp"], abs=2e-6), name
        assert found[name][-1] < found[name][0]
