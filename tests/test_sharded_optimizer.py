"""`cos598d.ShardedOptimizer`: torch's own tests of ZeroRedundancyOptimizer, redone on ours, against one optimizer."""

import copy

import pytest
import test_parallelize
import torch
import torch.distributed as dist
from test_parallel import ddp
from test_parallelize import assert_state_as
from torch import nn
from worlds import run_ranks

import cos598d
from cos598d.errors import UsageError, UserError

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw, maximize": (torch.optim.AdamW, {"lr": 0.01, "maximize": True, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.5}),
}


class Model(test_parallelize.Model):
    """With numbers of two dtypes, and a scalar."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.head.output.double()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids):
        return super().forward(ids, use=True)["logits"] * self.scale


def loss_of(model, rank, step):
    ids = torch.randint(0, 9001, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return model(ids).square().mean()


def same_gradients(model, step):
    """As every rank has them after an average, without one."""
    loss_of(model, 0, step).backward()


def assert_same(ours, theirs, what):
    for (name, p), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, expected), f"{what}: {name} is off by {(p - expected).abs().max():.1e}"


def in_groups(model):
    """Whole parameters tell which decay."""
    parameters = list(dict.fromkeys(model.parameters()))
    return [
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.02},
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
    ]


def keeps_parity(comm):
    """torch's test_local_optimizer_parity, _multiple_param_groups, _add_param_group, _lr_scheduler, _collect_shards:
    every optimizer under DDP and under ours; a layer that is frozen for a while; states that change places."""
    wrap = "sparse_rows" if comm.world_size == 3 else "ddp"
    for name, (kind, options) in KINDS.items():
        model, expected = Model(comm.rank), Model(comm.rank)
        wrapped, unsharded = (ddp(m) if wrap == "ddp" else cos598d.data_parallel(m, wrap) for m in (model, expected))
        groups, later = in_groups(model), wrap == "ddp" and name != "adagrad"  # torch's has no state for later ones
        ours = cos598d.ShardedOptimizer(groups[: 1 if later else 2], kind, **options)
        for group in groups[1:] if later else ():
            ours.add_param_group(group)
        theirs = kind(in_groups(expected), **options)
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2) for one in (ours, theirs)]
        for step in range(4):
            for one, module in ((ours, wrapped), (theirs, unsharded)):
                one.zero_grad()
                loss = one.step(lambda module=module, step=step: backward(loss_of(module, comm.rank, step)))
                assert loss > 0
            for m in (model, expected):
                m.layers[1].requires_grad_(step % 2 == 0)
            for schedule in schedules:
                schedule.step()
            assert_same(model, expected, (name, wrap, step))
        saved, reference = ours.state_dict(), copy.deepcopy(theirs.state_dict())
        assert_state_as(saved, reference, (name, wrap))
        ours.load_state_dict(reference)
        theirs.load_state_dict(saved)
        for one, module in ((ours, wrapped), (theirs, unsharded)):
            one.zero_grad()
            one.step(lambda module=module: backward(loss_of(module, comm.rank, 9)))
        assert_same(model, expected, (name, wrap, "after loading"))
        shard = copy.deepcopy(ours.shard_state_dict())
        before = copy.deepcopy(ours.state_dict())
        ours.step()
        ours.load_shard_state_dict(shard)
        assert_state_as(ours.state_dict(), before, (name, wrap, "after loading a shard"))
        with pytest.raises(UserError, match="is of 7 ranks"):
            ours.load_shard_state_dict(shard | {"ranks": 7})
        if wrap != "ddp":
            wrapped.detach()
            unsharded.detach()


def backward(loss):
    loss.backward()
    return loss


def keeps_a_share(comm):
    """torch's test_sharding: a rank keeps the state of an n-th of the elements, whatever their tensors' sizes."""
    model = Model()
    optimizer = cos598d.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    before = optimizer.communication
    same_gradients(model, 0)
    optimizer.step()
    held = sum(t.numel() for values in optimizer._own.state.values() for kind, t in values.items() if kind != "step")
    trained = [p for p in model.parameters() if p.requires_grad]
    everything = 2 * sum(p.numel() for p in trained)
    assert abs(held - everything / comm.world_size) < 16
    sent = sum(optimizer.communication.values()) - sum(before.values())
    share = (comm.world_size - 1) / comm.world_size * sum(p.nbytes for p in trained)
    assert abs(sent - share) <= 0.01 * share
    assert not optimizer.state
    total = sum(comm.exchange(held))
    assert total == everything


def saves_for_one_rank(comm):
    """torch's test_state_dict and _nondefault_process_group."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 0])]
    if comm.rank > 1:
        return
    model, expected = Model(), Model()
    ours = cos598d.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, process_group=groups[0])
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.01)
    for one, m in ((ours, model), (theirs, expected)):
        same_gradients(m, 0)
        one.step()
    ours.consolidate_state_dict(to=1)
    if comm.rank == 1:
        assert_state_as(ours.state_dict(), theirs.state_dict(), "consolidated")
    else:
        with pytest.raises(UserError, match=r"for rank 1, and this is rank 0\. Call state_dict\(\) on rank 1"):
            ours.state_dict()
    for one, m in ((ours, model), (theirs, expected)):
        one.step()
        one.zero_grad()
        assert all(p.grad is None for p in m.parameters())
    assert_state_as(ours.state_dict(), theirs.state_dict(), "after another step")
    other = cos598d.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.5, process_group=groups[1])
    other.load_state_dict(ours.state_dict())
    assert other.param_groups[0]["lr"] == 0.01


class WithoutClosure(torch.optim.SGD):
    def step(self):
        return super().step()


class WithKeywords(torch.optim.SGD):
    def step(self, closure=None, seen=None):
        super().step()
        if seen is not None:
            seen.append(5)
        self.param_groups[0]["new_key"] = 0.1


def takes_what_torch_takes(comm):
    """torch's test_step, _step_with_kwargs, _step_with_extra_inner_key, _step_without_closure, _constructor; a scaler,
    clipping, memory that is replaced, and a step without gradients."""
    x = torch.tensor([1.0], requires_grad=True)
    seen = []
    (x * 1.0).backward()
    optimizer = cos598d.ShardedOptimizer([x], WithKeywords, lr=0.1)
    optimizer.step(seen=seen)
    assert seen == [5]
    assert torch.equal(x.detach(), torch.tensor([1 - 0.1]))
    if comm.rank == 0:
        assert optimizer.param_groups[0]["new_key"] == 0.1
    cos598d.ShardedOptimizer([x], WithoutClosure, lr=0.1).step()
    assert torch.allclose(x.detach(), torch.tensor([0.8]))
    for given, error in (([], ValueError), (torch.randn(1), TypeError), (1.2, TypeError), ([x, 42], TypeError)):
        with pytest.raises(error):
            cos598d.ShardedOptimizer(given, torch.optim.SGD, lr=0.1)

    model, expected = Model(), Model()
    ours = cos598d.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(4):
        for one, m, scaler in ((ours, model, scalers[0]), (theirs, expected, scalers[1])):
            if step == 2:
                m.load_state_dict(copy.deepcopy(m.state_dict()))
                m.head.output.weight.data = m.head.output.weight.data.clone()
            loss = loss_of(m, 0, step) * (torch.inf if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(one)
            nn.utils.clip_grad_norm_(m.parameters(), 0.01)
            scaler.step(one)
            scaler.update()
            one.zero_grad()
            one.step()
        assert_same(model, expected, step)
    assert scalers[0].get_scale() == 4.0
    model.head.output.float()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(UsageError, match=r"has another shape, dtype or device than when ShardedOptimizer was made"):
        ours.step()


def refuses(comm):
    """One sentence each, on every rank; torch's test_same_dense_param_type refuses two dtypes, which ours takes."""
    matrix = nn.Parameter(torch.ones(6, 5))
    for kind in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(
            UsageError, match=f"{kind.__name__} cannot step shards of parameters .*or leave {kind.__name__}"
        ):
            cos598d.ShardedOptimizer([matrix], kind, lr=0.1)
    for mine in (nn.Parameter(torch.ones(6, 5 + comm.rank)), matrix):
        with pytest.raises(UserError, match="the ranks' optimizers differ: rank 1 has"):
            cos598d.ShardedOptimizer([mine], torch.optim.SGD, lr=0.1 + (comm.rank if mine is matrix else 0))
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = cos598d.ShardedOptimizer(table.parameters(), torch.optim.SGD, lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match=r"is sparse, .*sparse=False"):
        optimizer.step()
    with pytest.raises(TypeError, match="overlap_with_ddp"):
        cos598d.ShardedOptimizer([matrix], torch.optim.SGD, lr=0.1, overlap_with_ddp=True)


ALL = [keeps_parity, keeps_a_share, saves_for_one_rank, takes_what_torch_takes, refuses]


def goes_round(comm, functions):
    for function in functions:
        function(comm)
        comm.exchange(function.__name__)


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize(("world_size", "functions"), [(2, ALL), (3, ALL[:3]), (4, ALL[:2]), (1, ALL[1:2])])
def test_torchs_own_tests_hold_for_ours(world_size, functions):
    run_ranks(world_size, goes_round, functions, seconds=300)
