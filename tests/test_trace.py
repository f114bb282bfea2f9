"""Calls that bypass the communicator are found with their line, whichever of torch's functions makes them."""

from pathlib import Path

import torch
from worlds import run_ranks

from cos598d.terminal.own_code import load_file
from cos598d.tools.check.trace import trace_direct_calls

CODE = """import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradient
from torch.distributed import all_gather
own = torch.ones(2)
def run():
    group = dist.group.WORLD
    dist.all_reduce(own)  #! all_reduce
    all_gather([torch.ones(2) for _ in range(2)], own)  #! all_gather
    with_gradient.all_reduce(own)  #! all_reduce
    group.allreduce([own]).wait()  #! allreduce
    group.broadcast(own, 0).wait()  #! broadcast
    group._get_backend(torch.device("cpu")).allreduce([own]).wait()  #! allreduce
    functional.all_reduce(own, "sum", group).sum()  #! all_reduce
    functional.all_gather_tensor(own, 0, group).sum()  #! all_gather_into_tensor
    summed = torch.ops._c10d_functional.all_reduce(own, "sum", group.group_name)  #! all_reduce
    torch.ops._c10d_functional.wait_tensor(summed)
"""


def noticed(comm, path):
    found = []
    trace_direct_calls(found.append)
    load_file(Path(path), "own.py").run()
    comm.all_reduce(torch.ones(2), "through the communicator")
    return found


def test_every_call_that_bypasses_the_communicator_is_found_with_its_line(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(CODE)
    lines = CODE.splitlines()
    right = [f"{text.split('#! ')[1]} in line {line}" for line, text in enumerate(lines, 1) if "#! " in text]
    assert run_ranks(2, noticed, str(path)) == [right, right]
