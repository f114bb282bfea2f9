"""torch's tests of `fully_shard`'s training parity, redone on our shards: each case against one process, in float64."""

import contextlib
import copy
import functools

import pytest
import torch
from test_parallelize import OneProcess, assert_state_as
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import run_ranks

import cos598d
from cos598d.errors import UsageError, UserError


def draw(rank, step, *shape):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.out(torch.relu(self.into(x)))


class ParameterOnly(nn.Module):
    """No layer, no input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self):
        return self.weight @ self.weight


class Nested(nn.Module):
    """Inputs and outputs in tuples and dictionaries, and a custom layer with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(7, 5), nn.Parameter(torch.ones(5))

    def forward(self, x, others, *, factor):
        return {"all": (self.layer(x + others[0] + others[1]) * self.scale * factor, None)}


class Twice(nn.Module):
    """A layer that takes part twice in a forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x) + self.layers[0](x))


class Tied(nn.Module):
    """A table of rows that no number of ranks divides, which is the output layer too."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(17, 16), nn.ModuleList([Mlp(16) for _ in range(2)])
        self.output = nn.Linear(16, 17, bias=False)
        self.output.weight = self.table.weight
        self.checkpoints = False

    def forward(self, ids, skip_output=False):
        state = self.table(ids)
        for layer in self.layers:
            state = checkpoint(layer, state, use_reentrant=False) if self.checkpoints else layer(state)
        return state if skip_output else self.output(state)


def sequential(*shapes):
    return nn.Sequential(*(part for shape in shapes for part in (nn.Linear(*shape), nn.ReLU())))


def ids_of(rank, step):
    return torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(1000 * step + rank))


def checkpointed():
    model = Tied()
    model.checkpoints = True
    return model


def on_vectors(*shape):
    return lambda m, r, s: m(draw(r, s, *shape)).square().mean()


def on_ids(m, r, s):
    return m(ids_of(r, s)).square().mean()


def nested_loss(m, r, s):
    x = draw(r, s, 3, 7)
    return m(x, (x, x), factor=2.0)["all"][0].square().mean()


def chunks(m, r, s):
    """The output layer by itself, in chunks: none of the model's own forward."""
    inner = getattr(m, "module", m)
    state = m(ids_of(r, s), skip_output=True)
    return sum(inner.output(chunk).square().mean() for chunk in state.chunk(2, dim=1))


def a_part(m, r, s):
    """The whole, and in one step a part of it, called by itself."""
    return (getattr(m, "module", m)[0] if s == 1 else m)(draw(r, s, 3, 6)).square().mean()


# By torch's name: the model, and a rank's loss in a step.
CASES = {
    "train_parity_single_group (16, 15)": (lambda: sequential((16, 15), (15, 8)), on_vectors(4, 16)),
    "train_parity_single_group (7, 15)": (lambda: sequential((7, 15), (15, 3)), on_vectors(4, 7)),
    "train_parity_multi_group": (Tied, on_ids),
    "root_no_forward_inputs": (ParameterOnly, lambda m, r, s: m().square().mean() * (r + 1)),
    "root_move_forward_input": (Nested, nested_loss),
    "multi_forward_module": (Twice, on_vectors(3, 4)),
    "activation_checkpointing": (checkpointed, on_ids),
    "partial_group_forward_then_standalone": (Tied, chunks),
    "non_root_forward_backward": (lambda: nn.Sequential(*[Mlp(6) for _ in range(3)]), a_part),
}


def trains(comm, strategy, name):
    """Three steps, and one with a micro-batch before it, against one process."""
    make_model, loss = CASES[name]
    torch.manual_seed(5)
    model = make_model().double()
    expected = copy.deepcopy(model)
    make = lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-3)  # noqa: E731 - as scripts write it
    if strategy == "fully_shard":
        module = cos598d.fully_shard(model)
        optimizer = make(module.parameters())
    else:
        module, optimizer = cos598d.parallelize(model, make, strategy)
    reference, single = OneProcess(expected, comm.world_size), make(expected.parameters())
    for step in range(4):
        if step == 3:
            with module.no_sync():
                loss(module, comm.rank, 8).backward()
            reference.backward(lambda m, r: loss(m, r, 8))
        loss(module, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reference.step(single, lambda m, r, step=step: loss(m, r, step))
    assert_weights(module, expected, f"{strategy}, {name}")
    module.detach()


def assert_weights(module, expected, what):
    state = module.full_state_dict()
    for name, value in expected.state_dict().items():
        worst = (state[name] - value).abs().max()
        assert worst < 1e-12, f"{what}: {name} is off by {worst:.1e}"


def goes_round(comm, strategies):
    for strategy in strategies:
        for name in CASES:
            trains(comm, strategy, name)


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize(
    ("world_size", "strategies"),
    [
        (2, ["zero2", "fully_shard", "shared_weights"]),
        (3, ["zero1", "fully_shard"]),
        (4, ["sparse_zero1", "zero3"]),
    ],
)
def test_torchs_parity_cases_hold_for_our_shards(world_size, strategies):
    run_ranks(world_size, goes_round, strategies, seconds=300)


def refuses_casts(comm):
    """What torch's does and ours does not, and what both do in half precision."""
    for strategy in ("zero1", "zero3"):
        module, optimizer = cos598d.parallelize(Tied(), lambda p: torch.optim.Adam(p, 1e-2), strategy, bucket_mb=None)
        module.to(torch.float32).to("cpu")
        for cast in (module.double, module.bfloat16, lambda module=module: module.to("meta")):
            with pytest.raises(UsageError, match="the model's shards are float32 on cpu. Move or cast it before"):
                cast()
        with module.no_sync():
            module(ids_of(comm.rank, 0)).square().mean().backward()
        with pytest.raises(UserError, match=r"every backward of this step was inside no_sync\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        trains_in_half(module, optimizer, comm.rank, torch.autocast("cpu", torch.bfloat16))
        module.detach()


def trains_in_half(module, optimizer, rank, context):
    """Three steps on one batch: the output is bf16, gradients are float32, and the loss falls."""
    losses = []
    for _ in range(3):
        with context:
            output = module(ids_of(rank, 0))
        assert output.dtype == torch.bfloat16
        loss = output.float().square().mean()
        loss.backward()
        assert module.module.table.weight.grad.dtype == torch.float32
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_casts_are_refused_and_autocast_trains():
    run_ranks(2, refuses_casts)


def keeps_torchs_order(comm):
    """The optimizer after the model: schedules, closures, clipping, states both ways, parameters that train later."""
    saved = None
    for _ in range(2):
        torch.manual_seed(5)
        model = Tied().double()
        model.layers[1].requires_grad_(False)
        expected = copy.deepcopy(model)
        module = cos598d.fully_shard(model)
        reference = OneProcess(expected, comm.world_size)
        ours, single = (
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in (module, expected)
        )
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5) for one in (ours, single)]
        if saved is not None:
            ours.load_state_dict(saved)
            single.load_state_dict(saved)
        for step in range(4):
            assert ours.step(lambda module=module, step=step: clipped(module, comm.rank, step)) > 0
            reference.step(single, lambda m, r, step=step: on_ids(m, r, step), max_norm=0.1)
            ours.zero_grad()
            for schedule in schedules:
                schedule.step()
            if step == 1:
                for m, one in ((model, ours), (expected, single)):
                    m.layers[1].requires_grad_(True)
                    one.add_param_group({"params": list(m.layers[1].parameters()), "lr": 0.02})
        assert isinstance(ours, torch.optim.AdamW)
        state = ours.state_dict()
        assert_state_as(state, single.state_dict(), "fully_shard", rtol=1e-12, atol=1e-15)
        assert_weights(module, expected, "fully_shard")
        shards = copy.deepcopy(ours.shard_state_dict())
        ours.load_shard_state_dict(shards)
        first = state["param_groups"][0]["params"]
        saved = {
            "state": {place: values for place, values in state["state"].items() if place in first},
            "param_groups": state["param_groups"][:1],
        }
        module.detach()


def clip(module, *_):
    module.clip_grad_norm_(0.1)


class Plain(torch.optim.Optimizer):
    """Its step takes no closure."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


def keeps_hooks(comm):
    """Hooks of the script's own are called once in each step, in torch's order; what they change counts."""
    for kind in (torch.optim.SGD, Plain):
        for has_schedule in (False, True):
            torch.manual_seed(5)
            model = Tied().double()
            expected = copy.deepcopy(model)
            module, reference = cos598d.fully_shard(model), OneProcess(expected, comm.world_size)
            ours, single = (kind(m.parameters(), 0.1) for m in (module, expected))
            if has_schedule:  # it binds the step of the class that the optimizer has now
                torch.optim.lr_scheduler.StepLR(ours, 100)
            ours.register_step_pre_hook(functools.partial(clip, module))
            calls = []
            for step in range(3):
                if step < 2:  # one before the first step, and another after it
                    ours.register_step_pre_hook(lambda *_, calls=calls, step=step: calls.append(step))
                    ours.register_step_post_hook(lambda *_, calls=calls, step=step: calls.append(step + 10))
                on_ids(module, comm.rank, step).backward()
                ours.step()
                reference.step(single, lambda m, r, step=step: on_ids(m, r, step), max_norm=0.1)
            assert calls == [0, 10, 0, 1, 10, 11, 0, 1, 10, 11]
            assert_weights(module, expected, kind.__name__)
            module.detach()


def clipped(module, rank, step):
    loss = on_ids(module, rank, step)
    loss.backward()
    module.clip_grad_norm_(0.1)
    return loss


def computes_in_half(comm):
    """bf16 in each forward, gradients in float32; and what it refuses."""
    module = cos598d.fully_shard(Tied(), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    trains_in_half(module, optimizer, comm.rank, contextlib.nullcontext())
    for model in (nn.Sequential(module.module, nn.Linear(3, 3)), module.module.layers[0]):
        with pytest.raises(UsageError, match=r"is sharded already\. Call fully_shard once, for the whole model"):
            cos598d.fully_shard(model)
    on_ids(module, comm.rank, 3).backward()
    second = torch.optim.SGD(module.module.output.parameters(), 0.1)
    with pytest.raises(UsageError, match="another optimizer steps this model's shards already. Make one optimizer"):
        second.step()
    empty = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    empty.param_groups.clear()
    empty.step()
    optimizer.step()
    module.detach()
    for _ in range(2):
        with pytest.raises(UsageError, match="of a model that was detached. Make a new optimizer"):
            optimizer.step()
    again = cos598d.fully_shard(module.module)  # the model is the script's own again, and so are its parts
    again.detach()
    for wrap in (cos598d.fully_shard, cos598d.data_parallel):
        with pytest.raises(UsageError, match="bucket_mb"):
            wrap(Tied(), bucket_mb=0)
    with pytest.raises(UsageError, match=r"float16 is not known\. Give torch\.bfloat16"):
        cos598d.fully_shard(Tied(), compute_dtype=torch.float16)
    module = cos598d.fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.Muon(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UsageError, match="Muon cannot step shards"):
        optimizer.step()
    module.detach()


@pytest.mark.parametrize("world_size", [2, 3])
def test_optimizer_is_made_after_fully_shard(world_size):
    run_ranks(world_size, keeps_torchs_order)


def test_hooks_of_a_script_are_called_once_per_step():
    run_ranks(2, keeps_hooks)


def test_fully_shard_computes_in_bf16_and_refuses_wrong_use():
    run_ranks(2, computes_in_half)
