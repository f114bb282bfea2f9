"""Many ranks: who does not come is named on all of them, a group leaves no threads, and what ranks cost is measured."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from meetings import identities
from programs import script

from cos598d.errors import UserError
from cos598d.world.rendezvous import meet

CLOSED = """
import os
from cos598d.comm import process_group
import torch
process_group.open_group(None, "gloo")
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # loads torch.distributed.nn, which may keep the group
process_group.close_group()
print(sorted(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")))
"""
# The group is a script's, and open before anything of ours is imported.
BY_A_SCRIPT = """
import gc, os
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import cos598d
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = cos598d.data_parallel(model, "bucketed")
model(torch.ones(1)).backward()
optimizer.step()
dist.destroy_process_group()
del model
gc.collect()
print(sorted(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")))
"""


@pytest.mark.long
@pytest.mark.parametrize("code", [CLOSED, BY_A_SCRIPT], ids=["ours", "a script's"])
def test_a_closed_group_has_no_threads_left(code):
    """A thread of gloo that runs at exit may abort the process: "terminate called without an active exception"."""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "gloo" not in found.stdout
    assert "python" in found.stdout


@pytest.mark.long
def test_one_that_never_comes_and_one_with_another_secret_are_told_among_many(servers):
    them = identities(64)
    stranger = replace(them[63], secret=b"another secret, made up")

    def come(identity):
        with pytest.raises(UserError) as caught:
            meet(identity, 4, {})
        return str(caught.value)

    with ThreadPoolExecutor(63) as pool:
        *heard, refused = pool.map(come, [*them[:62], stranger])
    port = them[0].master_port
    assert set(heard) == {
        f"ranks 62, 63 did not come to 127.0.0.1:{port} within 4 s (--timeout); "
        "1 came with another --secret or from another run. "
        "Start them again, or check --master_ip, --master_port and the firewall."
    }
    assert refused.startswith(f"rank 0 at 127.0.0.1:{port} has another secret or belongs to another run. ")


@pytest.mark.long
def test_the_benchmark_of_ranks_says_what_phases_took_and_what_ranks_hold(start, tmp_path):
    folder = tmp_path / "runs"
    words = [script("benchmarks/ranks.py"), "--runs_dir", folder, "--world_sizes", 2, "--steps", 2]
    program = start("ranks", words, is_fresh=True)
    assert program.wait() == 0, program.text
    (found,) = json.loads((folder / "ranks.json").read_text())
    assert found["ranks"] == 2
    assert all(seconds > 0 for kind in ("clock_seconds", "processor_seconds") for seconds in found[kind].values())
    assert found["held"]["sockets"]["rank_0"] > found["held"]["sockets"]["mean"] > 2  # rank 0 serves the other one
    assert found["requests"]["arrive"] == 1
    assert "the processor's seconds of all ranks together" in program.text
    assert "meeting" in (folder / "ranks.svg").read_text()
