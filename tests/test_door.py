"""The door in a script: as torch's DDP, or one sentence."""

import contextlib
import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import world
from sync_cases import EXACT, options_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.parallel import data_parallel, parallelize
from cos598d.sync.base import GradientSync
from cos598d.sync.from_file import write_template

TORCH = ("torch", *EXACT)
OURS = [name for name in EXACT if name != "ddp"]
FOUND_LATE = ("bucketed", "all_reduce", "sparse_rows", "ddp")  # one of each kind of finish


@pytest.fixture(scope="module")
def ranks():
    with world(3) as started:
        yield started


class MySync(GradientSync):
    """The smallest one."""

    def average(self, name, gradient):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch(step=0):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, 8, generator=generator).double(), torch.randint(0, 3, (6,), generator=generator)


def wrap(model, sync, **options):
    """torch's DDP for "torch", else ours."""
    if sync == "torch":
        return DistributedDataParallel(model, find_unused_parameters=options.get("find_unused_parameters", True))
    return data_parallel(model, sync, **options_of(sync, **options))


def train(model, sync, steps=3, **options):
    """The losses of some steps, of this rank's batches."""
    wrapped, losses = wrap(model, sync, **options), []
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def said(action, *arguments, **keywords):
    """The sentence of the UserError that an action raises; "" if it raises none."""
    try:
        action(*arguments, **keywords)
    except UserError as error:
        return str(error)
    return ""


def of_each(action, syncs, *arguments):
    """What an action returns for each sync, or class. Run on each rank."""
    return {getattr(sync, "__name__", sync): action(sync, *arguments) for sync in syncs}


def losses(sync, make=net):
    return train(make(), sync)


def assert_as_torch(found):
    """Each sync has what the first has, which is torch's DDP, on every rank."""
    for of_rank in found:
        right = next(iter(of_rank.values()))
        for sync, value in of_rank.items():
            torch.testing.assert_close(value, right, rtol=0, atol=1e-12, msg=lambda said, sync=sync: f"{sync}: {said}")


# A sync of one's own


def test_a_file_made_from_the_template(ranks, tmp_path):
    path = tmp_path / "mine.py"
    write_template(path)
    assert "Check it:   cos598d check mine.py:MySync" in path.read_text()
    assert "average() is still to be written" in ranks.run(_unwritten, f"{path}:MySync", count=1)[0]
    text = path.read_text()
    body = text.index("        raise NotImplementedError")
    path.write_text(text[:body] + "        dist.all_reduce(gradient)\n        gradient /= self.ranks\n")
    assert_as_torch(ranks.run(of_each, losses, ["torch", f"{path}:MySync"], count=2))


def _unwritten(name):
    try:
        data_parallel(net(), name)(batch()[0]).sum().backward()
    except NotImplementedError as error:
        return str(error)
    return ""


# Hooks of the script


def _zeroing(sync, when):
    model = nn.Linear(4, 2)

    def zero(p):
        p.grad.zero_()

    if when == "before":
        model.weight.register_post_accumulate_grad_hook(zero)
    wrapped = wrap(model, sync)
    if when == "after":
        model.weight.register_post_accumulate_grad_hook(zero)
    wrapped(torch.ones(3, 4)).sum().backward()
    return not model.weight.grad.any()


def hooked():
    model = net()
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + module.weight.mean(),))
    return model


def normalized_batches():
    return nn.Sequential(net(), nn.BatchNorm1d(3, dtype=torch.float64))


# Steps of odd shapes


def _gan(sync, unused):
    unused = unused and sync != "torch"
    g, d = (
        wrap(net(), sync, find_unused_parameters=unused),
        wrap(nn.Linear(3, 1).double(), sync, find_unused_parameters=unused),
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (g, d)]
    for step in range(3):
        inputs, _ = batch(step)
        d.requires_grad_(True)
        optimizers[1].zero_grad()
        (d(g(inputs).detach()).mean() - d(inputs[:, :3]).mean()).backward()
        optimizers[1].step()
        d.requires_grad_(False)
        optimizers[0].zero_grad()
        (-d(g(inputs)).mean()).backward()
        optimizers[0].step()
    return [p.detach().sum().item() for each in (g, d) for p in each.parameters()]


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.layers, self.reentrant = nn.Linear(8, 8).double(), net(), reentrant

    def forward(self, inputs):
        return checkpoint(self.layers, self.first(inputs), use_reentrant=self.reentrant)


def _checkpointed(sync, reentrant):
    options = {"find_unused_parameters": False} if sync == "ddp" and reentrant else {}
    return train(Checkpointed(reentrant and sync != "torch"), sync, **options)


def _gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def _no_syncs(sync):
    """The gradients after a step of several backwards, in each order of contexts that DDP allows."""
    found, model = [], net()
    wrapped = wrap(model, sync)
    with wrapped.no_sync():
        inside = wrapped(batch(1)[0]).sum()
        with wrapped.no_sync():
            pass
        wrapped(batch(2)[0]).sum().backward()
    own = _gradients(model)
    inside.backward()  # its forward was inside
    found.append((_gradients(model) - own).norm() > 0)
    outside = wrapped(batch(3)[0]).sum()
    with wrapped.no_sync():
        outside.backward()  # its forward was outside
    found.append(_gradients(model))
    wrapped(batch(4)[0]).sum().backward()  # a second average in one step
    found.append(_gradients(model))
    model.zero_grad(set_to_none=False)
    wrapped(batch(5)[0]).sum().backward()
    found.append(_gradients(model))
    return found


def _two_models(sync):
    first, second = net(1), nn.Linear(3, 3).double()
    one, two = wrap(first, sync), wrap(second, sync)
    two(one(batch()[0])).square().sum().backward()
    return torch.cat([_gradients(first), _gradients(second)])


def _grad_of_inputs(sync):
    """torch.autograd.grad on one rank only: nothing is sent, so nobody waits."""
    model = net()
    wrapped = wrap(model, sync, find_unused_parameters=False)
    if dist.get_rank() == 0:
        inputs = batch()[0].requires_grad_()
        torch.autograd.grad(wrapped(inputs).sum(), inputs)
    has = [p.grad is None for p in model.parameters()]
    wrapped(batch()[0]).sum().backward()
    return all(has)


def _an_exception(sync):
    model = net()
    wrapped = wrap(model, sync)
    outputs = wrapped(batch()[0])

    def fail(_):
        raise KeyError("the script's own")

    handle = model[0].weight.register_hook(fail)
    with contextlib.suppress(KeyError):
        outputs.sum().backward()
        return False
    handle.remove()
    return "ended in an exception" in said(wrapped, batch()[0])


# Gradients of odd kinds


def looked_up_sparsely():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2)).double()


def _sparse(sync, unused):
    model = looked_up_sparsely()
    wrapped = wrap(model, sync, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        wrapped(torch.randint(0, 50, (4, 3), generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Sharing(nn.Module):
    """The gradients of its parameters lie in one memory."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(6))

    def forward(self, inputs):
        return ((self.below.view(6) + self.above) * inputs).sum()


def _sharing(sync):
    model = Sharing()
    wrap(model, sync)(torch.tensor(2.0 + dist.get_rank())).backward()
    return bool((_gradients(model) == 2.5).all())


def _large_halves(sync):
    model = nn.Linear(1, 1, bias=False).half()
    (wrap(model, sync)(torch.ones(1, 1).half()) * 40_000).sum().backward()
    return model.weight.grad.item() == 40_000


def _kept(sync):
    """A gradient that the script keeps, as PCGrad does, after the next step's backward."""
    model = net()
    wrapped = wrap(model, sync)
    wrapped(batch(1)[0]).sum().backward()
    kept = [p.grad for p in model.parameters()]
    before = [gradient.clone() for gradient in kept]
    model.zero_grad()
    wrapped(batch(2)[0]).sum().backward()
    return all(torch.equal(*pair) for pair in zip(kept, before, strict=True))


AS_TORCH = {
    "a sync of three lines": (losses, ["torch", MySync]),
    "a hook that the model has": (losses, TORCH, hooked),
    "buffers that the model has": (losses, TORCH, normalized_batches),
    "a discriminator that is frozen for a step": (_gan, ("torch", *FOUND_LATE), False),
    "the same, where parameters may be unused": (_gan, ("torch", *FOUND_LATE), True),
    "checkpointed layers": (_checkpointed, TORCH, False),
    "reentrant checkpoints": (_checkpointed, TORCH, True),
    "which backwards average": (_no_syncs, TORCH),
    "two models in one backward": (_two_models, TORCH),
    "sparse gradients": (_sparse, TORCH, False),
    "sparse gradients that may be unused": (_sparse, TORCH, True),
}


@pytest.mark.parametrize("case", AS_TORCH)
def test_a_script_gets_what_torch_s_ddp_gives(ranks, case):
    assert_as_torch(ranks.run(of_each, *AS_TORCH[case], count=2))


IS_TRUE = {
    "a hook that the model has runs before the average": (_zeroing, TORCH, "before"),
    "a hook that it gets later does so, too": (_zeroing, TORCH, "after"),
    "gradients of inputs are not averaged": (_grad_of_inputs, FOUND_LATE[:-1]),
    "a sum of halves does not overflow where the average does not": (_large_halves, EXACT),
    "gradients that share memory are averaged once": (_sharing, OURS),
    "an exception in backward is itself, and the next step says so": (_an_exception, OURS),
    "a gradient that the script keeps stays": (_kept, EXACT),
}


@pytest.mark.parametrize("case", IS_TRUE)
def test_of_every_sync(ranks, case):
    for found in ranks.run(of_each, *IS_TRUE[case], count=2):
        assert all(found.values()), found


# Groups of ranks


def _subgroup():
    members = [1, 2]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return {}
    found = {}
    for sync in EXACT:
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, dist.get_rank())
        wrapped = data_parallel(model, sync, group=group)
        wrapped(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        found[sync] = [model.weight[0, 0].item(), model.weight.grad[0, 0].item()]
    return found


def test_a_group_of_some_ranks(ranks):
    alone, *members = ranks.run(_subgroup)
    assert alone == {}
    for found in members:
        assert found == dict.fromkeys(EXACT, [1.0, 1.5])  # the group's first rank's weights, and the group's average


# Buffers


class Counts(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("large", torch.tensor([2**53 + 1 + rank]))
        self.register_buffer("hidden", torch.tensor([1.5 + rank]), persistent=False)
        self.register_buffer("flags", torch.tensor([rank == 0, True]))

    def forward(self, inputs):
        if self.training:
            self.large += dist.get_rank()
            self.hidden += dist.get_rank()
        return inputs * self.weight * self.hidden


def _buffers(sync):
    model = Counts(dist.get_rank())
    wrapped = wrap(model, sync)
    wrapped(torch.ones(1)).sum().backward()
    wrapped.eval()
    with torch.no_grad():
        output = wrapped(torch.ones(1)).item()  # as with DDP, on rank 0's buffers
    model.train()
    wrapped(torch.ones(1)).sum().backward()
    is_training = model.training
    if sync != "torch":
        wrapped.settle()
    return output, model.large.item(), model.hidden.item(), model.flags.tolist(), is_training and model.training


def test_buffers_are_those_of_rank_0(ranks):
    for found in ranks.run(of_each, _buffers, OURS, count=2):
        for sync, values in found.items():
            assert values == (1.5, 2**53 + 1, 1.5, [True, True], True), sync


# What is refused, in one sentence


def _refusals():
    found, model = {}, net()
    wrapped, _ = parallelize(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), "bucketed")
    inputs, _ = batch()
    replaced = net()
    other = data_parallel(replaced)
    replaced[0].weight = nn.Parameter(torch.ones(16, 8).double())
    found["0.weight was frozen when the model was wrapped, or is not"] = said(other, inputs)
    with torch.no_grad():  # an evaluation with other weights is no step
        found[""] = said(other, inputs)
    frozen = net()
    frozen[0].requires_grad_(False)
    wrapped = data_parallel(frozen)
    frozen[0].requires_grad_(True)
    found["0.weight was frozen"] = said(wrapped, inputs)
    wrapped = data_parallel(net(), find_unused_parameters=False)
    wrapped.module[2].bias.requires_grad_(False)
    found["2.bias got no gradient"] = said(wrapped(inputs).sum().backward)
    different = nn.Linear(8, 3 + dist.get_rank())
    found["the ranks' models differ: rank 1 has weight (4, 8) float32 where rank 0"] = said(data_parallel, different)
    found["bucket_mb has no effect with all_reduce"] = said(data_parallel, net(), "all_reduce", bucket_mb=1.0)
    found["--bucket_mb -1 is not valid. Give a number above 0"] = said(data_parallel, net(), "bucketed", bucket_mb=-1)
    found["unknown sync buckted. Did you mean 'bucketed'?"] = said(data_parallel, net(), "buckted")
    found["local_sgd acts in the optimizer's step"] = said(data_parallel, net(), "local_sgd")
    found["zero1 acts in the optimizer's step"] = said(data_parallel, net(), "zero1")
    return found


def test_refusals(ranks):
    for found in ranks.run(_refusals, count=2):
        for words, sentence in found.items():
            assert re.search(re.escape(words), sentence), (words, sentence)
            assert sentence == "" if words == "" else sentence.endswith(".")


# The end


def _after_detach(sync):
    ledger, model = Ledger(), net()
    wrapped = data_parallel(model, sync, ledger=ledger, **options_of(sync))
    wrapped(batch()[0]).sum().backward()
    assert wrapped.detach() is model
    with ledger:
        model(batch()[0]).sum().backward()
        wrapped(batch()[0]).sum().backward()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return len(ledger.rows), hooks


def test_a_detached_model_is_the_scripts_own(ranks):
    for found in ranks.run(of_each, _after_detach, EXACT, count=2):
        assert found == dict.fromkeys(EXACT, (0, 0))


def _dropped():
    model = net()
    wrapped = data_parallel(model)
    wrapped(batch()[0]).sum().backward()
    seen = weakref.ref(model)
    del model, wrapped
    gc.collect()
    return seen() is None


def test_a_wrapper_that_is_dropped_is_freed(ranks):
    assert ranks.run(_dropped, count=2) == [True, True]
