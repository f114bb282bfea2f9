"""`cos598d.data_parallel` replaces torch's DDP in a script, and does what DDP does there."""

import gc
import re
import subprocess
import sys
import weakref

import pytest
import torch
from programs import ROOT, free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import run_ranks

import cos598d
from cos598d.errors import UsageError
from cos598d.sync import SYNCS, get_sync

EXACT = [name for name in SYNCS if get_sync(name).exact and name != "none"]
TOLERANCE = 1e-6


class Model(nn.Module):
    """An embedding that is large enough to travel by rows, a frozen layer, and a layer that only some inputs use."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(9001, 31)
        self.frozen = nn.Linear(31, 31).requires_grad_(False)
        self.hidden = nn.Linear(31, 31)
        self.sometimes = nn.Linear(31, 31)
        self.output = nn.Linear(31, 3)

    def forward(self, ids, use=False):
        state = torch.tanh(self.hidden(self.frozen(self.embedding(ids).mean(dim=1))))
        return {"logits": self.output(self.sometimes(state) if use else state)}


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 9001, (4, 5), generator=generator)


def loss_of(module, rank, step, use=False):
    return module(batch(rank, step), use=use)["logits"].square().mean()


def ddp(model, group=None):
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)


def optimizer_of(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def train(module, rank, steps=4):
    """A plain loop, with a step in two parts and a layer that only rank 0 uses now and then."""
    optimizer = optimizer_of(module)
    for step in range(steps):
        optimizer.zero_grad()
        with module.no_sync():
            loss_of(module, rank, 50 + step).backward()
        loss_of(module, rank, step, use=rank == 0 and step == 1).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()


def assert_alike(mine, theirs, what):
    for (name, weight), expected in zip(mine.module.named_parameters(), theirs.module.parameters(), strict=True):
        worst = (weight - expected).abs().max().item()
        assert worst < TOLERANCE, f"{what}: {name} is off DDP's by {worst:.1e}"


def assert_gradients(module, expected, what):
    for (name, p), other in zip(module.module.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (other.grad is None), f"{what}: {name}"
        if p.grad is not None:
            assert (p.grad - other.grad).abs().max() < TOLERANCE, f"{what}: {name}"


def mean_gradients(comm, *losses, model=None):
    """A model with the mean over ranks of the sum of `losses`' gradients, each a function of (model, rank)."""
    model = model or Model(0)
    for rank in range(comm.world_size):
        for loss in losses:
            (loss(model, rank) / comm.world_size).backward()
    return model


def trains_as_ddp(comm):
    for name in EXACT:
        mine, theirs = cos598d.data_parallel(Model(comm.rank), name), ddp(Model(comm.rank))
        for module in (mine, theirs):
            train(module, comm.rank)
        assert_alike(mine, theirs, name)
        mine.detach()


@pytest.mark.long(one_in=2)
@pytest.mark.parametrize("world_size", [2, 4])
def test_exact_sync_trains_as_torchs_ddp(world_size):
    run_ranks(world_size, trains_as_ddp)


def on_one_rank(comm):
    module = cos598d.data_parallel(Model(0))
    loss_of(module, 0, 1).backward()
    assert_gradients(module, mean_gradients(comm, lambda m, r: loss_of(m, r, 1)), "one rank")


def two_models(comm):
    first, second = cos598d.data_parallel(Model(0), "bucketed"), cos598d.data_parallel(Model(7), "sparse_rows")
    (loss_of(first, comm.rank, 1) + loss_of(second, comm.rank, 2)).backward()
    assert_gradients(first, mean_gradients(comm, lambda m, r: loss_of(m, r, 1)), "first")
    assert_gradients(second, mean_gradients(comm, lambda m, r: loss_of(m, r, 2), model=Model(7)), "second")


def called_twice(comm):
    for name in ("bucketed", "sparse_rows", "shared_memory", "flat"):
        module = cos598d.data_parallel(Model(0), name)
        (loss_of(module, comm.rank, 1) + loss_of(module, comm.rank, 2, use=True)).backward()
        one, other = (lambda m, r: loss_of(m, r, 1)), (lambda m, r: loss_of(m, r, 2, use=True))
        assert_gradients(module, mean_gradients(comm, one, other), f"{name}, one backward")
        module.zero_grad()
        for step in (1, 2):
            loss_of(module, comm.rank, step, use=step == 2).backward()
        assert_gradients(module, mean_gradients(comm, one, other), f"{name}, two backwards")


def evaluated_in_between(comm):
    module = cos598d.data_parallel(Model(0), "sparse_rows")
    with torch.no_grad():
        loss_of(module, comm.rank, 9)
    loss = loss_of(module, comm.rank, 1)
    with torch.no_grad():
        if comm.rank == 0:  # not on every rank: nothing travels
            loss_of(module, comm.rank, 8, use=True)
    torch.autograd.grad(loss_of(module, comm.rank, 7), module.module.hidden.weight)
    loss.backward()
    assert_gradients(module, mean_gradients(comm, lambda m, r: loss_of(m, r, 1)), "after evaluation")


def thawed(comm):
    module, expected = cos598d.data_parallel(Model(comm.rank)), Model(0)
    for step, trains in enumerate((False, True, True, False)):
        for model in (module.module, expected):
            model.frozen.requires_grad_(trains)
            model.output.requires_grad_(not trains)
            model.zero_grad()
        loss_of(module, comm.rank, step).backward()
        mean_gradients(comm, lambda m, r, step=step: loss_of(m, r, step), model=expected)
        assert_gradients(module, expected, f"step {step}")
    assert module.ledger.totals("state")["output.weight"].calls == 1, "the state travelled again"


class Trip(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("tripped")


def checkpointed(comm):
    for reentrant in (True, False):
        module = cos598d.data_parallel(Model(0))
        inner = module.module.hidden.forward
        module.module.hidden.forward = lambda x, inner=inner, r=reentrant: checkpoint(inner, x, use_reentrant=r)
        loss_of(module, comm.rank, 1).backward()
        assert_gradients(module, mean_gradients(comm, lambda m, r: loss_of(m, r, 1)), f"reentrant {reentrant}")


def in_a_group_of_its_own(comm):
    groups = [torch.distributed.new_group(ranks) for ranks in ([0], [1, 2])]
    if comm.rank == 0:
        return
    for name in EXACT:
        mine = cos598d.data_parallel(Model(comm.rank), name, process_group=groups[1])
        theirs = ddp(Model(comm.rank), groups[1])
        for module in (mine, theirs):
            train(module, comm.rank - 1)
        assert_alike(mine, theirs, name)


def counts_what_travels(comm):
    module = cos598d.data_parallel(Model(0), "all_reduce", find_unused_parameters=False)
    for _ in range(3):
        loss_of(module, comm.rank, 1, use=True).backward()
    total = module.ledger.totals()
    weight = module.module.hidden.weight
    assert set(total) == {name for name, p in module.module.named_parameters() if p.requires_grad}
    assert total["hidden.weight"].calls == 3
    assert total["hidden.weight"].payload_bytes == 3 * 4 * weight.numel()
    assert total["hidden.weight"].bytes_sent == 3 * 4 * weight.numel()  # 2 (n-1)/n S, n = 2
    assert "frozen.weight" in module.ledger.totals("state")
    assert module.ledger.rows == []


class Mine(get_sync("flat")):
    """A class of the user's own."""


def takes_codecs_and_classes(comm):
    for arguments in (("bucketed", {"compress": "bf16"}), (Mine, {}), ("bucketed", {"bucket_mb": 0.01})):
        module = cos598d.data_parallel(Model(0), arguments[0], **arguments[1])
        loss_of(module, comm.rank, 1).backward()
        expected = mean_gradients(comm, lambda m, r: loss_of(m, r, 1))
        worst = (module.module.output.weight.grad - expected.output.weight.grad).abs().max()
        assert worst < 1e-2 * expected.output.weight.grad.abs().max()
    for arguments, words in (
        (("no_such",), "unknown sync no_such"),
        (("zero1",), "unknown sync zero1.*cos598d.parallelize"),
        (("local_sgd",), "averages weights after the optimizer's step"),
    ):
        with pytest.raises(UsageError, match=words):
            cos598d.data_parallel(Model(0), *arguments)
    with pytest.raises(UsageError, match="compress has no effect with overlap. Leave it out, or choose one of .*ring"):
        cos598d.data_parallel(Model(0), "overlap", compress="bf16")
    with pytest.raises(UsageError, match="it has no parameters"):
        cos598d.data_parallel(nn.Tanh())


ON_TWO = (two_models, called_twice, evaluated_in_between, thawed, checkpointed, counts_what_travels)


@pytest.mark.parametrize(
    ("function", "ranks"),
    [
        (on_one_rank, 1),
        *((function, 2) for function in (*ON_TWO, takes_codecs_and_classes)),
        (in_a_group_of_its_own, 3),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_data_parallel_does_what_a_script_may_ask_of_ddp(function, ranks):
    run_ranks(ranks, function)


@pytest.mark.parametrize("sync", ["all_reduce", "bucketed", "ddp"])
def test_model_dropped_without_detach_is_freed(sync):
    assert run_ranks(1, drop_a_model, sync) == [True]


def drop_a_model(comm, sync):
    model = nn.Linear(3, 2)
    module = cos598d.data_parallel(model, sync=sync)
    module(torch.ones(1, 3)).sum().backward()
    left = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(module)]
    del model, module
    gc.collect()
    return all(reference() is None for reference in left)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("data_parallel", cos598d.data_parallel),
        ("parallelize", lambda model: cos598d.parallelize(model, optimizer_of, "zero3")),
        ("fully_shard", cos598d.fully_shard),
        ("ShardedOptimizer", lambda model: cos598d.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)),
    ],
)
def test_call_without_a_process_group_names_init_process_group(name, call):
    with pytest.raises(UsageError, match=rf"{name} needs an open process group\. Call .*init_process_group"):
        call(nn.Linear(2, 2))


def test_importing_the_package_loads_no_torch():
    code = "import sys, cos598d; before = 'torch' in sys.modules; cos598d.data_parallel; assert not before"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_examples_with_and_without_ddp_and_in_shards_end_with_the_same_loss(start):
    said = []
    shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    for words in (["digits.py"], ["digits_ddp.py"], ["digits_shards.py", "zero3"], ["digits_shards.py", "ddp"]):
        command, port = [ROOT / "examples" / words[0], *words[1:]], str(free_port())
        environs = [shared | {"MASTER_PORT": port, "RANK": str(rank)} for rank in range(2)]
        ranks = [start("-".join([*words, place["RANK"]]), command, place) for place in environs]
        for rank in ranks:
            assert rank.wait() == 0, rank.text
        said.append(re.search(r"loss after 100 steps: (\S+)", ranks[0].text)[1])
    assert len(set(said)) == 1, said
