"""What was sent: formula, ledger and kernel side by side."""

import ctypes
import io
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import world
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cos598d.comm.ledger import Ledger
from cos598d.formulas import FACTS, Job
from cos598d.parallel import data_parallel, parallelize
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.base import GradientSync

BUCKET_MB, FIRST_MB, STEPS = 0.5, 0.1, 4
HELD = {"local_sgd": {"sync_every": 2}, "diloco": {"sync_every": 2}}
# As many calls as its formula says; torch's own and those of zero3's layers are counted otherwise.
COUNTED = [name for name in FACTS if name not in ("ddp", "zero3", "sparse_zero1")]


@pytest.fixture(scope="module")
def ranks():
    with world(4) as started:
        yield started


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5_000, 64)  # 1.28 MB
        self.layers = nn.ModuleList(nn.Linear(64 if k == 0 else 256, 256) for k in range(5))

    def forward(self, ids):
        x = self.table(ids).mean(dim=1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def ids_of(step, rank):
    return torch.randint(0, 5_000, (6, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def _measured(name):
    """Of the last steps: the bytes that this rank sent for gradients and weights, and its calls, per step."""
    ledger, kind = Ledger(), get_sync(name)
    sizes = {"bucket_mb": BUCKET_MB, "first_bucket_mb": FIRST_MB}
    options = {k: v for k, v in sizes.items() if k in kind.takes} | HELD.get(name, {})
    with ledger:
        parallel, optimizer = parallelize(Net(), lambda ps: torch.optim.AdamW(ps, 1e-3), name, ledger=ledger, **options)
        for step in range(1, STEPS + 1):
            ledger.begin(step)
            parallel(ids_of(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = [row for row in ledger.rows if row.iteration > STEPS // 2 and row.purpose in ("gradients", "parameters")]
        parallel.settle()
        parallel.detach()
    return [sum(row.bytes_sent for row in rows) / (STEPS // 2), len(rows) / (STEPS // 2)]


def _measured_all(names):
    return {name: _measured(name) for name in names}


def job(n):
    sizes = tuple(p.nbytes for p in Net().parameters())
    rows = [
        [len(ids_of(step, rank).unique()) / 5_000 for rank in range(n)] for step in range(STEPS // 2 + 1, STEPS + 1)
    ]
    union = [
        len(torch.cat([ids_of(step, rank) for rank in range(n)]).unique()) / 5_000
        for step in range(STEPS // 2 + 1, STEPS + 1)
    ]
    own = sum(map(sum, rows)) / len(rows) / n * (1 + 8 / 256)  # with 8 bytes for the number of each row of 256
    shape = {"bucket_mb": BUCKET_MB, "first_bucket_mb": FIRST_MB, "L": 6}
    return Job(sizes, n, u=sum(union) / len(union), v=own, E=sizes[0], **shape)


# On a power of two where that makes another algorithm; the others are long.
MEASURED = [(3, list(FACTS)), (4, ["halving_doubling", "tree", "hierarchical", "zero1"])]
MEASURED += [pytest.param(4, [name for name in FACTS if name not in MEASURED[1][1]], marks=pytest.mark.long)]


@pytest.mark.parametrize(("n", "names"), MEASURED)
def test_the_formula_is_what_the_ledger_has(ranks, n, names):
    assert set(FACTS) == set(SYNCS)
    found, base = ranks.run(_measured_all, names, count=n), job(n)
    for name in names:
        facts, own = FACTS[name], {"H": 2} if name in HELD else {}
        this = Job(**(vars(base) | own))
        for rank, measured in enumerate(found):
            sent, calls = measured[name]
            tolerance = 0.05 if name == "sparse_zero1" else 1e-3  # whose rows differ from rank to rank
            assert sent == pytest.approx(facts.sent(this, rank), rel=tolerance, abs=1e-3 * this.S), (name, rank)
            if name in COUNTED:
                assert calls == facts.calls(this), (name, rank)


# Which calls are seen, and as what


def _torchs_ddp():
    ledger = Ledger()
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(50, 50), nn.BatchNorm1d(50)), find_unused_parameters=True)
    with ledger:
        ledger.begin(1)
        wrapped(torch.ones(4, 50)).sum().backward()
    deadline = time.monotonic() + 60
    while any(row.seconds is None for row in ledger.rows) and time.monotonic() < deadline:
        time.sleep(0.01)  # the reducer waits for a future, whose callbacks come after
    return [
        [row.purpose, row.op, row.payload_bytes, row.seconds is not None and row.seconds > 0] for row in ledger.rows
    ]


def test_calls_that_torch_makes_in_cpp(ranks):
    for rows in ranks.run(_torchs_ddp, count=2):
        assert ["gradients", "all_reduce", 4 * (50 * 50 + 3 * 50), True] in rows
        assert [purpose for purpose, *_ in rows if purpose == "buffers"], rows
        assert all(has_seconds for *_, has_seconds in rows)


class OwnGroups(GradientSync):
    """A student's: it makes groups and messages of its own, and names nothing."""

    def attach(self, model):
        self.pair = dist.new_group([0, 1])
        return super().attach(model)

    def average(self, name, gradient):
        if self.rank < 2:
            dist.all_reduce(gradient, group=self.pair)
        if self.rank == 0:
            dist.send(gradient, 2)
        if self.rank == 2:
            mine = gradient.clone()
            dist.recv(gradient, 0)
            gradient += mine
        dist.broadcast(gradient, 2)
        gradient /= self.ranks


def _own_groups():
    ledger, model = Ledger(), nn.Linear(10, 10)
    with ledger:
        wrapped = data_parallel(model, OwnGroups, ledger=ledger)
        ledger.begin(1)
        wrapped(torch.ones(1, 10)).sum().backward()
        dist.barrier()
    rows = [row for row in ledger.rows if row.iteration == 1 and row.purpose == "gradients" and row.tensor == "weight"]
    return [[row.op, row.bytes_sent, row.bytes_received] for row in rows]


def test_a_students_calls_have_names_whatever_their_group(ranks):
    S = 400
    first, second, third = ranks.run(_own_groups, count=3)
    assert first == [["all_reduce", S, S], ["send", S, 0], ["broadcast", 0, S]]
    assert second == [["all_reduce", S, S], ["broadcast", 0, S]]
    assert third == [["recv", 0, S], ["broadcast", 2 * S, 0]]


def _ledgers():
    outer, inner, closed = Ledger(), Ledger(), Ledger()
    tensor = torch.ones(100)
    with outer:
        outer.begin(1)
        with outer.naming("an own name", "evaluation"):
            dist.all_reduce(tensor)
        with inner:
            with inner.naming("outside"), inner.composing("my_all_reduce", tensor, "composed"):
                dist.all_reduce(tensor)
                with inner.naming("apart", "agreement"):
                    dist.all_reduce(tensor[:1])
            call = dist.all_reduce(tensor, async_op=True)
            assert call is not None
            call.wait()
    with closed.naming("nothing"), closed.composing("nothing", tensor, "nothing"):
        dist.all_reduce(tensor)
    found = [[[row.purpose, row.op, row.tensor] for row in each.rows] for each in (outer, inner, closed)]
    return [found, all(row.seconds is not None for row in (*outer.rows, *inner.rows))]


def test_several_ledgers(ranks):
    for (outer, inner, closed), have_seconds in ranks.run(_ledgers, count=2):
        assert outer[0] == ["evaluation", "all_reduce", "an own name"]
        assert [op for _, op, _ in outer] == ["all_reduce"] * 4
        assert inner == [
            ["agreement", "all_reduce", "apart"],
            ["gradients", "my_all_reduce", "composed"],
            ["gradients", "all_reduce", "call 1"],
        ]
        assert closed == []
        assert have_seconds


def _written():
    output = io.StringIO()
    ledger, tensor, sums = Ledger(output, lambda iteration: iteration % 2 == 1), torch.ones(1000), []
    with ledger:
        for iteration in (1, 2, 3):
            ledger.begin(iteration)
            for name in ("a", "b"):
                with ledger.naming(name):
                    dist.broadcast(tensor, 0)
                    dist.all_reduce(tensor)
            with ledger.naming("loss", "loss"):
                dist.all_reduce(tensor[:1])
            sums.append(ledger.take())
    rows = [json.loads(line) for line in output.getvalue().splitlines()]
    return [rows, sums, len(ledger.rows)]


def test_rows_are_written_and_sums_are_kept(ranks):
    for rank, (rows, sums, left) in enumerate(ranks.run(_written, count=2)):
        assert [row["iteration"] for row in rows] == [1] * 5 + [3] * 5
        assert {row["tensor"] for row in rows} == {"a", "b", "loss"}
        assert all(row["seconds"] > 0 and row["started"] >= 0 for row in rows)
        moved = [4000 * (2 if rank == 0 else 0) + 8000, 4000 * (0 if rank == 0 else 2) + 8000]
        assert sums == [{"gradients": [4, 16_000, *moved], "loss": [1, 4, 4, 4]}] * 3
        assert left == 0


def _sparse_sum():
    table = torch.sparse_coo_tensor([[dist.get_rank()]], torch.ones(1, 4), (9, 4), check_invariants=False)
    with Ledger() as ledger:
        ledger.begin(1)
        dist.all_reduce(table)
        ledger.take()
    return [table.to_dense().sum().item(), [row.payload_bytes for row in ledger.rows]]


def test_a_sparse_tensor_is_entered_with_the_bytes_of_its_dense_form(ranks):
    assert ranks.run(_sparse_sum, count=2) == [[8.0, [9 * 4 * 4]]] * 2


# The kernel

WIRED = (
    "gather_scatter",
    "reduce_broadcast",
    "all_reduce",
    "bucketed",
    "ring",
    "halving_doubling",
    "tree",
    "ddp",
    "zero1",
)


NEW_NETWORK = 0x40000000  # for unshare(2) and setns(2), which this Python does not have


def _enter_a_network():
    """A network of these ranks alone, which rank 0 makes."""
    kernel, pid = ctypes.CDLL(None), torch.tensor(os.getpid())
    if dist.get_rank() == 0:
        assert kernel.unshare(NEW_NETWORK) == 0
        subprocess.run(("ip", "link", "set", "lo", "up"), check=True)
    dist.broadcast(pid, 0)
    if dist.get_rank() > 0:
        with open(f"/proc/{pid.item()}/ns/net") as place:
            assert kernel.setns(place.fileno(), NEW_NETWORK) == 0


def _step_on_the_wire(name):
    def sent_through_lo():
        (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
        return int(line.split(":")[1].split()[8])

    ledger, model = Ledger(), nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(3)))
    with ledger:
        parallel, optimizer = parallelize(model, lambda ps: torch.optim.SGD(ps, 0.1), name, ledger=ledger)
        for step in (1, 2):
            ledger.begin(step)
            dist.barrier()
            begin = sent_through_lo()
            dist.barrier()
            parallel(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
            dist.barrier()
            end = sent_through_lo()
            dist.barrier()
    return [begin, end, sum(row.bytes_sent for row in ledger.rows if row.iteration == 2)]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
def test_the_kernel_counts_what_the_ledger_has():
    with world(3) as started:
        started.run(_enter_a_network)
        for name in WIRED:
            found = started.run(_step_on_the_wire, name)
            begins, ends, sent = zip(*found, strict=True)
            assert max(ends) - min(begins) == pytest.approx(sum(sent), rel=0.02), name  # headers, and the barriers
