"""The ledger enters torch's own buckets, and DDP takes torch's options to be faster."""

import pytest
import torch
from worlds import run_each, run_ranks

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.errors import UsageError
from cos598d.records.conventions import GRADIENTS
from cos598d.sync.ddp import DDP, PLAIN_STEPS, DDPOptions
from cos598d.sync.options import SyncOptions
from cos598d.tools.exam.models import plain_loss, plain_model


def buckets_by_step(comm):
    """On a rank: the elements of each bucket in four steps of a model of 20 layers of 40 kB."""
    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(20)])
    sync = DDP(comm, find_unused_parameters=False, options=SyncOptions(bucket_mb=0.1))
    module = sync.attach(model)
    found = []
    for _ in range(4):
        comm.ledger = Ledger()
        module(torch.ones(2, 100)).sum().backward()
        sync.finish()
        found.append([row.shape[0] for row in comm.ledger.rows if row.purpose == GRADIENTS])
        model.zero_grad(set_to_none=True)
    return found


def test_the_ledger_enters_torch_s_buckets_from_the_second_step_on():
    for found in run_ranks(2, buckets_by_step):
        assert [sum(sizes) for sizes in found] == [20 * 100 * 101] * 4
        # 0.1 MiB is three layers' 26,214 elements at most, and torch closes a bucket when it has reached that.
        assert found[1] == found[2] == found[3]
        assert found[1] == [30_300] * 6 + [20_200]


def buckets_of_two(comm, widths):
    """On a rank: the sizes of the calls of two models of one process group in each of three joint backward passes."""
    found = []
    comms = [Communicator(comm.group, comm.backend, comm.device) for _ in widths]
    models = [torch.nn.Sequential(torch.nn.BatchNorm1d(10), torch.nn.Linear(10, width)) for width in widths]
    syncs = [DDP(own, find_unused_parameters=False) for own in comms]
    modules = [sync.attach(model) for sync, model in zip(syncs, models, strict=True)]
    for _ in range(3):
        for own in comms:
            own.ledger = Ledger()
        sum(module(torch.ones(2, 10)).sum() for module in modules).backward()
        for sync in syncs:
            sync.finish()
        found.append([[row.shape[0] for row in own.ledger.rows] for own in comms])
    return found


@pytest.mark.parametrize("widths", [(10, 3), (4, 4)])
def test_two_models_of_one_group_enter_only_their_own_calls(widths):
    for found in run_ranks(2, buckets_of_two, widths):
        # BatchNorm's buffers of float32 and its counter, then the one bucket.
        assert found == [[[20, 1, 20 + 11 * width] for width in widths]] * 3


def averages_of(comm, options):
    """On a rank: the gradients of a second step, its bytes, those of the formula, and the number of storages."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    sync = DDP(comm, find_unused_parameters=False, options=DDPOptions(**options))
    module = sync.attach(model)
    for step in range(2):
        comm.ledger = Ledger()
        model.zero_grad(set_to_none=True)
        inputs = torch.randn(4, 50, generator=torch.Generator().manual_seed(step * 10 + comm.rank))
        module(inputs).square().mean().backward()
        sync.finish()
    gradients = [p.grad for p in model.parameters()]
    sizes = [(p.numel(), p.element_size()) for p in model.parameters()]
    cost = DDP.expected(sizes, comm.world_size, comm.rank, sync.options)
    return {
        "gradients": torch.cat([gradient.flatten() for gradient in gradients]).tolist(),
        "bytes": sum(row.bytes_sent for row in comm.ledger.rows if row.purpose == GRADIENTS),
        "expected": cost.bytes_sent,
        "storages": len({gradient.untyped_storage().data_ptr() for gradient in gradients}),
    }


def test_bucket_views_give_the_same_average_without_a_copy_and_fp16_halves_the_bytes():
    for plain, view, fp16 in zip(*run_each(2, averages_of, [{}, {"bucket_view": True}, {"compress": "fp16"}])):
        assert view["gradients"] == plain["gradients"]
        assert (plain["storages"], view["storages"]) == (4, 1), "each gradient its own memory, and all in one bucket"
        assert fp16["gradients"] != plain["gradients"]
        half, whole = torch.tensor(fp16["gradients"]), torch.tensor(plain["gradients"])
        assert (half - whole).abs().max() < 2**-10 * whole.abs().max()
        assert plain["bytes"] == view["bytes"] == plain["expected"] == 2 * fp16["bytes"] == 2 * fp16["expected"]


def test_gloo_refuses_the_bf16_hook():
    comm = Communicator(None, "gloo", torch.device("cpu"))
    with pytest.raises(UsageError, match="^--compress bf16 with --sync ddp: torch's hook is for nccl"):
        DDP(comm, options=SyncOptions(compress="bf16"))


def hooked(comm, hook, every, steps):
    """On a rank: the gradient bytes of steps of SGD under a hook, and the sum of the weights after each step."""
    options = DDPOptions(ddp_hook=hook, sync_every=every)
    sync = DDP(comm, find_unused_parameters=False, options=options)
    model = plain_model()
    module = sync.attach(model)
    seen, equal = [], []

    def note():
        equal.append([sync.replicas_equal, sum(p.detach().double().sum().item() for p in model.parameters())])

    for step in range(steps):
        comm.ledger = Ledger()
        comm.ledger.begin(step + 1, 0.0)
        plain_loss(module, comm.rank, step).backward()
        sync.finish()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        sync.after_step()
        seen.append(sum(row.bytes_sent for row in comm.ledger.rows if row.purpose == GRADIENTS))
        note()
    sync.settle()
    note()
    sync.detach()
    return seen, equal


@pytest.mark.parametrize(("hook", "every"), [("powersgd", 1), ("post_localsgd", 2)])
def test_powersgd_and_local_sgd_hooks_start_after_plain_steps_and_the_ledger_enters_them(hook, every):
    size = 4 * sum(p.numel() for p in plain_model().parameters())
    (sent, mine), (_, theirs) = run_ranks(2, hooked, hook, every, PLAIN_STEPS + 4)
    plain, later = sent[:PLAIN_STEPS], sent[PLAIN_STEPS:]
    assert plain[2:] == [size] * (PLAIN_STEPS - 2)  # 2(n-1)/n S
    for (is_equal, one), (_, other) in zip(mine, theirs, strict=True):
        assert (one == other) is is_equal, (one, other)
    assert mine[-1][0]
    if hook == "powersgd":
        assert all(0 < each < size / 10 for each in later), later
    else:
        assert sorted(later) == [0, 0, size, size], later
