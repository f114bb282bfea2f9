"""What scripts do around a model of shards: used as torch's DDP or a plain optimizer would, or one sentence."""

import copy
import functools

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from cos598d.parallel import parallelize
from cos598d.zero.sharded_optimizer import ShardedOptimizer

ZERO = ("zero1", "zero2", "zero3")
SHARDED = (*ZERO, "sparse_zero1", "shared_weights")
WHOLE = ("bucketed", "all_reduce", "sparse_rows")  # one of each kind of finish


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch(step, rank):
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 8, generator=random).double(), torch.randint(0, 3, (6,), generator=random)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def wrapped(model, how, make=sgd):
    """A model and its optimizer under a sync, or under torch's DDP."""
    if how == "ddp":
        model = DistributedDataParallel(model)
        return model, make(model.parameters())
    return parallelize(model, make, how)


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def whole(model):
    """All weights in one tensor."""
    if hasattr(model, "settle"):
        model.settle()
    return torch.cat([p.detach().flatten() for p in model.module.parameters()])


def steps(rank, model, optimizer, count=3, before=None, change=None, loss_of=loss_of, seen=()):
    """Some steps, and the whole model then. `before` acts before each step, `change` between backward and the step."""
    seen = list(seen)
    for step in range(count):
        if before:
            before(model)
        loss = loss_of(model, step, rank)
        loss.backward()
        if change:
            change(model)
        seen.append(loss.detach().view(1))
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([*seen, whole(model)])


# Each case is (rank, how) -> a tensor, under a sync or torch's DDP: they have to be equal.


def weight_norm(rank, how):
    """A forward_pre_hook that the model already has."""
    model = net()
    nn.utils.weight_norm(model[0])
    return steps(rank, *wrapped(model, how))


def pruned(rank, how):
    model = net()
    prune.l1_unstructured(model[2], "weight", 0.3)
    return steps(rank, *wrapped(model, how))


def dropped_gradient(rank, how):
    def drop(model):
        next(model.module.parameters()).grad = None

    return steps(rank, *wrapped(net(), how), change=drop)


def two_backwards(rank, how):
    """Each gradient is added to the last average, which a step without zero_grad keeps."""
    model, optimizer = wrapped(net(), how)
    for step in range(3):
        loss_of(model, step, rank).backward()
        loss_of(model, 10 + step, rank).backward()
        optimizer.step()
        if step == 1:
            model.zero_grad()
    return whole(model)


def edited(rank, how, edit):
    """Weights that the script changes between two steps, before the first one and after it."""
    model = net()
    kept = list(model.parameters())

    @torch.no_grad()
    def change(model):
        if how == "zero3":
            model.settle()
        edit(model.module, kept)

    return steps(rank, *wrapped(model, how), count=2, before=change)


VALUES = {name: torch.full_like(value, 0.3) for name, value in net().state_dict().items()}
EDITS = {
    "filled": lambda model, kept: [p.fill_(0.1) for p in model.parameters()],
    "loaded": lambda model, kept: model.load_state_dict(VALUES),
    "clamped": lambda model, kept: [p.clamp_(-0.05, 0.05) for p in kept],
}


def replaced(rank, how):
    """A weight that the script gives other memory, or fills while it is on other ranks."""
    said = []
    for edit in (lambda p: setattr(p, "data", torch.ones_like(p)), lambda p: p.fill_(1.0)):
        model, _ = wrapped(net(), how)
        with torch.no_grad():
            edit(model.module[2].weight)
        said.append(words(lambda model=model: loss_of(model, 0, rank)))
    return said


def own_optimizer(rank, how):
    """A class that says that it treats every element by itself."""
    return steps(rank, *wrapped(net(), how, functools.partial(Declared, lr=0.5)))


def evaluated(rank, how):
    """An evaluation between steps, and one between backward and the step, which is left out once."""
    model, optimizer = wrapped(net(), how)
    seen = []
    for step in range(3):
        loss_of(model, step, rank).backward()
        with torch.no_grad():
            seen.append(loss_of(model, 50, 0).view(1))
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(loss_of(model, 50, 0).view(1))
    return torch.cat([*seen, whole(model)])


def penalty(rank, how):
    """Double backward through three layers."""

    def loss(model, step, rank):
        x, y = batch(step, rank)
        output = model(x.requires_grad_(True))
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return nn.functional.cross_entropy(output, y) + gradient.norm(dim=1).mean()

    return steps(rank, *wrapped(net(), how), loss_of=loss)


def input_gradient(rank, how):
    """Adversarial examples: one backward ends at the inputs."""

    def loss(model, step, rank):
        x, y = batch(step, rank)
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(x.requires_grad_(True)), y), x)
        return nn.functional.cross_entropy(model((x + 0.1 * gradient.sign()).detach()), y)

    return steps(rank, *wrapped(net(), how), loss_of=loss)


def compiled(rank, how):
    return steps(rank, *wrapped(torch.compile(net(), backend="eager"), how), count=2)


def compiled_layer(rank, how):
    model = net()
    model[2].compile(backend="eager")
    return steps(rank, *wrapped(model, how), count=2)


def autocast(rank, how):
    model, _ = wrapped(net().float(), how)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch(0, 0)[0].float())
    return (output.detach() * (2 if output.dtype == torch.bfloat16 else 1)).double()


def frozen_for_a_step(rank, how):
    model, optimizer = wrapped(net(), how)
    for step in range(3):
        model.module[2].requires_grad_(step != 1 or how == "ddp")
        loss_of(model, step, rank).backward()
        if how == "ddp" and step == 1:
            for p in model.module[2].parameters():
                p.grad = None
        model.module[2].requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def in_place_activation(rank, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 3)).double()
    return steps(rank, *wrapped(model, how))


ALIKE = (
    weight_norm, pruned, dropped_gradient, two_backwards, evaluated, penalty, input_gradient, own_optimizer,
    compiled, compiled_layer, autocast, frozen_for_a_step, in_place_activation,
)  # fmt: skip
CASES = {case.__name__: case for case in ALIKE}
CASES |= {name: functools.partial(edited, edit=edit) for name, edit in EDITS.items()}


# Each of these gives the words of an error.


def words(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def read_gradient(rank, how):
    model, _ = wrapped(net(), how)
    loss_of(model, 0, rank).backward()
    return words(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def written_gradient(rank, how):
    """As PCGrad does, and as a script does that ends its step inside of no_sync."""
    model, optimizer = wrapped(net(), how)
    loss_of(model, 0, rank).backward()
    weight = model.module[2].weight
    weight.grad = torch.ones_like(weight)
    return words(optimizer.step), words(lambda: model.clip_grad_norm_(1.0))


class ByNorm(torch.optim.SGD):
    """Clips by the norm of each parameter's gradient in its step."""

    most = 1.0

    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], self.most)
        super().step(closure)


class ByLargeNorm(ByNorm):
    most = 1e6


class Declared(torch.optim.SGD):
    elementwise = True


class Normed(torch.optim.SGD):
    """Steps by gradients of length 1: with tiny ones, too."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad /= p.grad.norm() + 1e-20
        super().step(closure)


def not_elementwise(rank, how):
    makes = [functools.partial(kind, lr=0.1) for kind in (ByNorm, ByLargeNorm, Normed)]
    return [words(functools.partial(wrapped, net(), how, make)) for make in makes]


def copied(rank, how):
    model, _ = wrapped(net(), how)
    loss_of(model, 0, rank)
    x, _ = batch(0, 0)
    model.settle()
    twin = copy.deepcopy(model.module)
    loss_of(model, 1, rank).backward()  # the copy stays whole, and is no part of the training
    return words(lambda: copy.deepcopy(model)), twin(x), net()(x)


def own_exception(rank, how):
    model, _ = wrapped(net(), how)

    def fail(_):
        raise KeyError("mine")

    model.module[2].weight.register_hook(fail)
    return words(lambda: loss_of(model, 0, rank).backward())


def other_passes(rank, how):
    """Rank 0 has three micro-batches, rank 1 has two."""
    model, _ = wrapped(net(), how)

    def run():
        for place in range(3 - rank):
            if place < 2 - rank:
                with model.no_sync():
                    loss_of(model, place, rank).backward()
            else:
                loss_of(model, place, rank).backward()

    return words(run)


def max_norm(rank, how):
    return words(lambda: wrapped(nn.Embedding(10, 4, max_norm=1.0), how))


class ReadElsewhere(nn.Module):
    """Reads a layer's weights outside of the layer's own forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.linear(self.first(x).tanh(), self.last.weight, self.last.bias)


def read_early(rank, how):
    if how not in ("zero1", "zero2", "sparse_zero1"):
        return "Leave gather_in_forward out"
    model, optimizer = parallelize(ReadElsewhere().double(), sgd, how, bucket_mb=1e-6, gather_in_forward=True)
    return words(lambda: steps(rank, model, optimizer))


SAID = (replaced, read_gradient, read_early, written_gradient, max_norm, not_elementwise, copied, own_exception)


def other_strides(rank, how):
    """A sharded optimizer next to torch's DDP, of channels_last weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last).double()
    ddp = DistributedDataParallel(model)
    options = {"lr": 0.05, "momentum": 0.9}
    if how == "ddp":
        plain = torch.optim.SGD(model.parameters(), **options)
    else:
        plain = ShardedOptimizer(model.parameters(), torch.optim.SGD, **options)
    for step in range(4):
        random = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(6, 3, 8, 8, generator=random).double(), torch.randint(0, 2, (6,), generator=random)
        plain.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        plain.step()
        if step == 1:
            plain.load_state_dict(copy.deepcopy(plain.state_dict()))
    momentum = [plain.state_dict()["state"][k]["momentum_buffer"].contiguous().flatten() for k in range(6)]
    return torch.cat([*[p.detach().contiguous().flatten() for p in model.parameters()], *momentum])


def everything(rank, ranks):
    found = {}
    for name, case in CASES.items():
        for how in ("ddp", *SHARDED, *WHOLE):
            is_refused = (how == "shared_weights" and name in EDITS) or (how, name) == ("zero3", "penalty")
            action = functools.partial(case, rank, how)
            found[name, how] = words(action) if is_refused else action()
    for case in SAID:
        for how in SHARDED:
            found[case.__name__, how] = case(rank, how)
    for how in ("zero2", "zero3"):
        found["other_passes", how] = other_passes(rank, how)
    for how in ("ddp", "sharded"):
        found["other_strides", how] = other_strides(rank, how)
    return found


@pytest.fixture(scope="module")
def found():
    return on_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", SHARDED + WHOLE)
def test_a_script_gets_what_ddp_gives(found, case, how):
    for of_rank in found:
        ours, ddp = of_rank[case, how], of_rank[case, "ddp"]
        if isinstance(ours, str):
            assert ("one memory for all ranks" if case in EDITS else "builds a graph of itself") in ours
        else:
            assert (ours - ddp).abs().max() < 1e-9


@pytest.mark.parametrize("how", SHARDED)
def test_what_shards_cannot_do_is_said(found, how):
    for of_rank in found:
        assert "Clip by model.clip_grad_norm_(max_norm)" in of_rank["read_gradient", how]
        assert all("2.weight has a gradient that is not averaged" in said for said in of_rank["written_gradient", how])
        assert all("may not step shards" in said for said in of_rank["not_elementwise", how])
        assert "Leave gather_in_forward out" in of_rank["read_early", how]
        assert "Set max_norm to None" in of_rank["max_norm", how]
        whole, inner, right = of_rank["copied", how]
        assert "copy.deepcopy(wrapped.module)" in whole
        assert torch.equal(inner, right)
        moved, filled = of_rank["replaced", how]
        assert "2.weight was given other memory" in moved
        assert "Change weights in place" in moved
        assert filled == {"zero3": moved}.get(how, "nothing") or ("one memory" in filled and how == "shared_weights")
        assert of_rank["own_exception", how] == "KeyError: 'mine'"


@pytest.mark.parametrize("how", ["zero2", "zero3"])
def test_another_number_of_micro_batches_is_named(found, how):
    for of_rank in found:
        assert "1 of 2 ranks are inside no_sync" in of_rank["other_passes", how]


def test_a_sharded_optimizer_keeps_strides(found):
    for of_rank in found:
        assert (of_rank["other_strides", "sharded"] - of_rank["other_strides", "ddp"]).abs().max() < 1e-9
