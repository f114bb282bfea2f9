"""torch's tests of `fully_shard`'s training parity, redone on our shards: each case against one process, in float64."""

import copy

import pytest
import torch
from test_parallelize import Alone
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
    """Three steps, and one with a micro-batch before it; at most so far from one process is the worst weight."""
    make_model, loss = CASES[name]
    torch.manual_seed(5)
    model = make_model().double()
    expected = copy.deepcopy(model)
    make = lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-3)  # noqa: E731 - as scripts write it
    module, optimizer = cos598d.parallelize(model, make, strategy)
    alone, single = Alone(expected, comm.world_size), make(expected.parameters())
    for step in range(4):
        if step == 3:
            with module.no_sync():
                loss(module, comm.rank, 8).backward()
            alone.backward(lambda m, r: loss(m, r, 8))
        loss(module, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        alone.backward(lambda m, r, step=step: loss(m, r, step))
        alone.average()
        single.step()
        single.zero_grad()
    state = module.full_state_dict()
    worst = max(float((state[key] - value).abs().max()) for key, value in expected.state_dict().items())
    module.detach()
    return worst


def goes_round(comm, strategies):
    for strategy in strategies:
        for name in CASES:
            worst = trains(comm, strategy, name)
            assert worst < 1e-12, f"{strategy}, {name}: off by {worst:.1e}"


@pytest.mark.parametrize(
    ("world_size", "strategies"),
    [(2, ["zero2", "zero3", "shared_weights"]), (3, ["zero1", "zero3"]), (4, ["sparse_zero1", "zero3"])],
)
def test_what_torch_trains_in_shards_trains_in_ours(world_size, strategies):
    run_ranks(world_size, goes_round, strategies, seconds=300)


def says(comm):
    """What torch's does and ours does not, and what both do in half precision."""
    for strategy in ("zero1", "zero3"):
        module, optimizer = cos598d.parallelize(Tied(), lambda p: torch.optim.Adam(p, lr=1e-2), strategy)
        module.to(torch.float32).to("cpu")
        for cast in (module.double, module.bfloat16, lambda module=module: module.to("meta")):
            with pytest.raises(UsageError, match="the model's shards are float32 on cpu. Move or cast it before"):
                cast()
        with module.no_sync():
            module(ids_of(comm.rank, 0)).square().mean().backward()
        with pytest.raises(UserError, match=r"every backward of this step was inside no_sync\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        losses = []
        for _ in range(3):  # computed in bf16, gradients summed in float32
            with torch.autocast("cpu", torch.bfloat16):
                output = module(ids_of(comm.rank, 0))
            assert output.dtype == torch.bfloat16
            loss = output.float().square().mean()
            loss.backward()
            assert module.module.table.weight.grad.dtype == torch.float32
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        module.detach()


def test_what_ours_does_not_take_is_a_sentence():
    run_ranks(2, says)
