"""The ledger of an audited script matches torch's bucket sizes, the formulas, and the kernel's counters."""

import json
import os
import subprocess
import sys

import pytest
from programs import ROOT

STEPS = 12
SCRIPT = """
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)


def counted():
    dist.barrier()
    return sum(int(line.split()[9]) for line in open("/proc/net/dev") if line.split()[0] == "lo:")


begun = counted()
model = nn.Sequential(nn.Linear(301, 512), nn.ReLU(), nn.Linear(512, 513), nn.ReLU(), nn.Linear(513, 7))
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(4, 301)).square().mean().backward()
    optimizer.step()
moved = counted() - begun
if rank == 0:
    logged = model._get_ddp_logging_data() if hasattr(model, "_get_ddp_logging_data") else {{}}
    buckets = {{name: logged.get(name) for name in ("bucket_sizes", "rebuilt_bucket_sizes")}}
    print("FOUND", json.dumps({{"moved": moved, **buckets}}))
dist.destroy_process_group()
"""
DDP = "model = DistributedDataParallel(model, bucket_cap_mb=0.5)"
FSDP2 = """mesh = init_device_mesh("cpu", (ranks,))
fully_shard(model[2], mesh=mesh)
fully_shard(model, mesh=mesh)"""
UNIT, ROOT_UNIT = ((513, 512), (513,)), ((512, 301), (512,), (7, 513), (7,))

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0,
    reason="a loopback interface of its own needs root",
)


def audited(folder, wrap, ranks):
    """What the script printed, and the books, from a network namespace in which nothing else is sent."""
    (folder / "train.py").write_text(SCRIPT.format(wrap=wrap, steps=STEPS))
    audit = [sys.executable, "-m", "cos598d", "audit", "--world_size", ranks, "--output_dir", folder / "audit"]
    command = [
        "unshare",
        "--net",
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "sh",
        *map(str, audit),
        "--",
        "train.py",
    ]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    books = [json.loads((folder / "audit" / "books" / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return json.loads(line.removeprefix("FOUND")), books


def payloads(book, op, kind):
    """The bytes of each call of that kind, the first ones first."""
    rows = [row for row in book["ledger"] if (row["op"], row["kind"]) == (op, kind)]
    return [(row["first_iteration"], row["payload_bytes"] // row["calls"], row["calls"]) for row in rows]


def check_bytes(moved, books):
    """The kernel counts the bytes of the ledger's formulas, and the headers of packets."""
    formula = sum(row["bytes_sent"] for book in books for row in book["ledger"])
    assert formula <= moved <= 1.05 * formula, f"{moved} bytes on the wire, {formula} by the ledger"


@pytest.mark.long
def test_the_ledger_of_ddp_matches_torchs_buckets_and_the_kernels_bytes(tmp_path):
    found, books = audited(tmp_path, DDP, 2)
    rows = payloads(books[0], "all_reduce", "gradient")
    first, rebuilt = (
        [int(size) for size in found[name].split(",")] for name in ("bucket_sizes", "rebuilt_bucket_sizes")
    )
    assert [size for step, size, _ in rows if step == 1] == first
    assert [size for step, size, _ in rows if step > 1] == [size for size in rebuilt if size not in first]
    assert len(rebuilt) > 1
    each_step = 4 * sum(rows * columns for rows, columns in ((302, 512), (513, 513), (514, 7)))
    assert sum(rebuilt) == each_step
    assert sum(size * calls for _, size, calls in rows) == STEPS * each_step
    check_bytes(found["moved"], books)


def cut(shapes, ranks):
    """Elements of each rank's part of tensors whose rows are filled up to equal parts."""
    return sum(-(-shape[0] // ranks) * (shape[1] if len(shape) > 1 else 1) for shape in shapes)


@pytest.mark.long
def test_the_ledger_of_fsdp2_matches_the_formulas_and_the_kernels_bytes(tmp_path):
    ranks = 3
    found, books = audited(tmp_path, FSDP2, ranks)
    unit, root = (4 * cut(shapes, ranks) for shapes in (UNIT, ROOT_UNIT))
    for book in books:
        gathers = {size: calls for _, size, calls in payloads(book, "all_gather", "weight")}
        sums = {size: calls for _, size, calls in payloads(book, "reduce_scatter", "gradient")}
        # The root's weights stay from forward to backward, the unit's are gathered again.
        assert gathers == {root: STEPS, unit: 2 * STEPS}
        assert sums == {ranks * root: STEPS, ranks * unit: STEPS}
    check_bytes(found["moved"], books)
