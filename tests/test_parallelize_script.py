"""What a script may ask of `cos598d.parallelize` next to steps: states, schedules, scalers, exceptions, bad input."""

import contextlib
import copy
import gc
import io
import warnings
from datetime import timedelta

import pytest
import torch
from test_parallel import Trip
from test_parallelize import (
    SHARDS,
    Linear,
    Model,
    OneProcess,
    assert_as,
    assert_state_as,
    loss_of,
    plainly,
    plainly_in_one,
    rounded,
)
from torch import nn
from worlds import run_ranks

import cos598d
from cos598d.errors import UsageError, UserError

EVERY = [*SHARDS, "bucketed"]


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def in_groups(params):
    """Matrices in a group that decays, all else in another: whole parameters tell."""
    groups = [[p for p in params if p.ndim < 2], [p for p in params if p.ndim >= 2]]
    return torch.optim.AdamW([{"params": groups[0], "lr": 0.02}, {"params": groups[1], "weight_decay": 0.1}], lr=0.01)


def scheduled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01], total_steps=6)  # which sets betas, too


def goes_on_from_a_state(comm, strategy, other):
    """Two steps, a state, and two steps of another strategy from it: weights and states are one process's."""
    expected = Model(0)
    reference, single = OneProcess(expected, comm.world_size), in_groups(list(expected.parameters()))
    schedule = scheduled(single)
    state, saved, saved_schedule = None, None, None
    for word in (strategy, other):
        module, optimizer = cos598d.parallelize(Model(comm.rank), in_groups, word)
        rates = scheduled(optimizer)
        if state is not None:
            module.load_state_dict(state)
            optimizer.load_state_dict(saved)
            rates.load_state_dict(saved_schedule)
        for step in range(2):
            plainly(module, optimizer, comm.rank, step)
            plainly_in_one(reference, single, step)
            rates.step()
            schedule.step()
        state, saved, saved_schedule = module.full_state_dict(), optimizer.state_dict(), rates.state_dict()
        assert_as(state, expected, f"{strategy} to {other}")
        assert list(state) == list(expected.state_dict())
        assert_state_as(saved, single.state_dict(), word)
        plain = Model(5)
        plain.load_state_dict(state)
        in_groups(list(plain.parameters())).load_state_dict(saved)
        module.detach()


def leaves_out_what_overflows(comm, strategy):
    """A GradScaler on each rank: one rank's loss is too large in step 1, and all leave that step out."""
    expected = Model(0)
    reference, single = OneProcess(expected, comm.world_size), adamw(expected.parameters())
    module, optimizer = cos598d.parallelize(Model(comm.rank), adamw, strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        scale = scaler.get_scale()
        loss = loss_of(module, comm.rank, step) * (torch.inf if step == 1 and comm.rank == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            reference.step(single, lambda m, r, step=step, scale=scale: scale * loss_of(m, r, step), factor=1 / scale)
    assert scaler.get_scale() == 4.0
    assert_as(module.full_state_dict(), expected, strategy)
    module.detach()


def tripping(rank):
    model = Model(rank)
    model.trips = False
    model.layers[1].register_forward_hook(lambda _, __, out: Trip.apply(out) if model.trips else out)
    return model


def leaves_out_what_raises(comm, strategy):
    """An exception in one rank's backward, which it catches: no rank makes that step, and all go on."""
    expected = Model(0)
    reference, single = OneProcess(expected, comm.world_size), adamw(expected.parameters())
    module, optimizer = cos598d.parallelize(tripping(comm.rank), adamw, strategy)
    for step in range(4):
        module.module.trips = step == 1 and comm.rank == 1
        with warnings.catch_warnings(record=True) as seen, contextlib.suppress(RuntimeError):
            warnings.simplefilter("always")
            loss_of(module, comm.rank, step).backward()
        said = [str(each.message) for each in seen if "rank 1 left backward" in str(each.message)]
        assert len(said) == (step == 1), said
        assert (module.module.layers[1].weight.grad is None) == (step == 1)
        optimizer.step()
        optimizer.zero_grad()
        if step != 1:
            plainly_in_one(reference, single, step)
    assert_as(module.full_state_dict(), expected, strategy)
    module.detach()


def keeps_what_only_some_steps_read(comm, strategy):
    """Evaluation in between, torch.autograd.grad, gradients that are dropped, a step without any; buffers; bytes."""
    expected = Model(0)
    reference, single = OneProcess(expected, comm.world_size), adamw(expected.parameters())
    module, optimizer = cos598d.parallelize(Model(comm.rank), adamw, strategy)
    optimizer.step()
    for step in range(3):
        with torch.no_grad():
            loss_of(module, comm.rank, 30)
        loss_of(module, comm.rank, 40).backward()
        optimizer.zero_grad() if step else module.zero_grad()
        loss_of(module, comm.rank, 50).backward()
        for p in module.parameters():
            p.grad = None
        loss = loss_of(module, comm.rank, step)
        optimizer.zero_grad()  # after forward, as many scripts do
        loss.backward()
        torch.autograd.grad(loss_of(module, comm.rank, 60), module.module.head.output.weight)
        module.module.layers[1].bias.grad = None
        optimizer.step()
        reference.backward(lambda m, r, step=step: loss_of(m, r, step))
        expected.layers[1].bias.grad = None
        reference.average()
        single.step()
        single.zero_grad()
    state = module.full_state_dict()
    assert_as(state, expected, strategy)
    assert len(set(comm.exchange(state["calls"].item()))) == 1, "buffers differ"
    sent = module.communication
    assert sum(sent.values()) == sum(
        total.bytes_sent for purpose in purposes(module) for total in module.ledger.totals(purpose).values()
    )
    assert any(sent.values()) != (strategy == "shared_weights" and comm.world_size == 1)
    module.detach()


def trains_more_later(comm, strategy):
    """A layer that was frozen at first, in a group or not, a layer that is new, and one that is frozen for a while."""
    models = Model(comm.rank), Model(0)
    for model in models:
        model.layers[1].bias.requires_grad_(False)

    def make(params):
        return adamw([p for p in params if p.requires_grad or p.shape == (31,)])

    module, optimizer = cos598d.parallelize(models[0], make, strategy)
    reference, single = OneProcess(models[1], comm.world_size), make(models[1].parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (optimizer, single)]
    for step in range(5):
        plainly(module, optimizer, comm.rank, step)
        plainly_in_one(reference, single, step)
        for schedule in schedules:
            schedule.step()
        for model in models:
            model.layers[2].bias.requires_grad_(step != 1)
        if step == 0:
            for model in models:
                model.layers[1].bias.requires_grad_(True)
        if step == 2:
            with pytest.raises(UsageError, match="that is not the model's"):
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            for model, one in zip(models, (optimizer, single), strict=True):
                torch.manual_seed(7 + (comm.rank if model is models[0] else 0))
                model.layers.append(Linear(31, 31))
                model.frozen.weight.requires_grad_(True)
                added = [model.frozen.weight, *model.layers[3].parameters()]
                for p in added:
                    p.register_hook(rounded)
                one.add_param_group({"params": added, "lr": 0.03})
    assert_as(module.full_state_dict(), models[1], f"{strategy}, more parameters")
    assert_state_as(optimizer.state_dict(), single.state_dict(), strategy)
    loss_of(module, comm.rank, 0).backward()
    with pytest.raises(UsageError, match=r"Call it after optimizer.step\(\) or zero_grad\(\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.zero_grad()
    module.detach()


def goes_on_from_its_shard(comm, strategy):
    """Each rank saves its own shard of the state, and another optimizer continues from it to the same weights."""
    ends, saved = [], {}
    for _ in range(2):
        module, optimizer = cos598d.parallelize(Model(comm.rank), in_groups, strategy)
        rates = scheduled(optimizer)
        if saved:
            module.load_state_dict(saved["model"])
            optimizer.load_shard_state_dict(saved["shard"])
            rates.load_state_dict(saved["rates"])
        for step in range(2 if saved else 0, 4):
            if step == 2 and not saved:
                file = io.BytesIO()
                torch.save({"shard": optimizer.shard_state_dict(), "rates": rates.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file, weights_only=True) | {"model": module.full_state_dict()}
                held = sum(t.numel() for values in saved["shard"]["state"].values() for t in values.values())
            plainly(module, optimizer, comm.rank, step)
            rates.step()
        ends.append(module.full_state_dict())
        if len(ends) == 1:
            module.detach()
    assert all(torch.equal(ends[0][name], tensor) for name, tensor in ends[1].items())
    whole = sum(t.numel() for values in optimizer.state_dict()["state"].values() for t in values.values())
    assert strategy == "sparse_zero1" or held < whole / comm.world_size + 100
    shard, is_first = saved["shard"], comm.rank == 0
    for wrong, words in (
        ({"state": {}}, r"is not one of shard_state_dict\(\)\. Give a whole state to load_state_dict"),
        (shard | {"ranks": 9}, f"is of 9 ranks, and there are {comm.world_size}"),
        (shard if is_first else shard | {"rank": 0}, "is rank 0's, and this is rank 1"),
        (shard if is_first else shard | {"cut": []}, "has another cut than this rank's optimizer. Load it with"),
        (shard | {"optimizer": "SGD"}, "has another optimizer than"),
    ):
        with pytest.raises(UserError, match=words):
            optimizer.load_shard_state_dict(wrong)
    module.detach()


def finds_replaced_memory(comm, strategy):
    """Whatever replaces a parameter's tensor: a step would change memory that the model does not have any more."""
    module, optimizer = cos598d.parallelize(Model(comm.rank), adamw, strategy)
    plainly(module, optimizer, comm.rank, 0)
    module.settle()
    weight = module.module.layers[1].weight
    weight.data = weight.data.clone()
    if strategy == "zero3":  # which gives every layer's weights other memory in each forward
        plainly(module, optimizer, comm.rank, 1)
    else:
        with pytest.raises(UserError, match=r"layers.1.weight has other memory than its shards"):
            loss_of(module, comm.rank, 1)
    module.detach()


def purposes(module):
    return {purpose for purpose, _ in module.ledger._totals}


CASES = [leaves_out_what_overflows, leaves_out_what_raises, keeps_what_only_some_steps_read]


def goes_round(comm, strategies):
    for place, strategy in enumerate(strategies):
        for function in CASES:
            function(comm, strategy)
        goes_on_from_a_state(comm, strategy, strategies[place - 1])
        if strategy in SHARDS:
            trains_more_later(comm, strategy)
            goes_on_from_its_shard(comm, strategy)
            finds_replaced_memory(comm, strategy)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_strategy_does_what_a_script_may_ask(world_size):
    """Each strategy in one of the worlds."""
    run_ranks(world_size, goes_round, EVERY[world_size - 2 :: 2], seconds=500)


def averages_weights(comm):
    """local_sgd with an average after each step is averaged gradients, under plain SGD; both end alike on all ranks."""
    expected = Model(0)
    make = lambda params: torch.optim.SGD(params, lr=0.05)  # noqa: E731 - as scripts write it
    reference, single = OneProcess(expected, comm.world_size), make(expected.parameters())
    module, optimizer = cos598d.parallelize(Model(comm.rank), make, "local_sgd", sync_every=1)
    for step in (0, 2, 3):  # in which all ranks use the same parameters
        plainly(module, optimizer, comm.rank, step)
        plainly_in_one(reference, single, step)
    assert_as(module.full_state_dict(), expected, "local_sgd", within=1e-6)
    module.detach()
    for name, options in (("local_sgd", {"sync_every": 2}), ("diloco", {"sync_every": 1, "fragments": 3})):
        module, optimizer = cos598d.parallelize(Model(comm.rank), adamw, name, **options)
        before = module.full_state_dict()
        for step in range(5):
            plainly(module, optimizer, comm.rank, step)
        after = module.full_state_dict()
        assert not torch.equal(before["head.output.weight"], after["head.output.weight"])
        sums = comm.exchange([tensor.double().sum().item() for tensor in after.values()])
        assert all(each == sums[0] for each in sums), f"{name}: the replicas differ"
        module.detach()
    module, optimizer = cos598d.parallelize(Model(comm.rank), adamw, "local_sgd", sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        loss = loss_of(module, comm.rank, step) * (torch.inf if step == 1 and comm.rank == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert comm.exchange(scaler.get_scale()) == [4.0] * comm.world_size
    module.detach()


def test_local_sgd_and_diloco_average_weights_after_the_scripts_steps():
    run_ranks(2, averages_weights)


class Rotated(torch.optim.SGD):
    """An optimizer that looks at whole matrices."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm()
        return super().step(closure)


def refuses(comm):
    """One sentence each, the same on every rank, and every rank goes on."""
    for strategy, make, words in (
        ("zreo3", adamw, "unknown strategy zreo3\\. Did you mean 'zero3'"),
        ("torch_fsdp", adamw, "strategy torch_fsdp is another library's engine"),
        ("zero1", Rotated, "Rotated cannot step shards of parameters .*Take .* that treats every element by itself"),
        ("zero2", torch.optim.Adafactor, "Adafactor cannot step shards"),
        ("zero2", torch.optim.LBFGS, "LBFGS cannot step shards"),
        ("zero3", torch.optim.Muon, "Muon"),
        ("zero1", lambda params: adamw(params[1:]), "the optimizer leaves out embedding.weight, which trains"),
        (
            "zero1",
            lambda params: adamw([*params, nn.Parameter(torch.ones(3))]),
            "shape \\(3,\\) that is not the model's",
        ),
    ):
        with pytest.raises((UsageError, ValueError), match=words):
            cos598d.parallelize(Model(0), make, strategy)
    for options, words in (
        ({"compress": "bf16"}, "compress has no effect with zero1. Leave it out, or choose one of .*ring"),
        ({"colour": 1}, "colour has no effect with zero1. Leave it out."),
        ({"bucket_mb": -1.0}, "bucket_mb -1 is not valid. Give a number above 0"),
    ):
        with pytest.raises(UsageError, match=words):
            cos598d.parallelize(Model(0), adamw, "zero1", **options)
    with pytest.raises(UsageError, match="bucket_mb has no effect with auto"):
        cos598d.parallelize(Model(0), adamw, "auto", bucket_mb=5)
    for strategy in [*EVERY, "auto"]:
        with pytest.raises(UserError, match="the ranks' models differ: rank 1 has"):
            cos598d.parallelize(nn.Linear(3, 3 + comm.rank), adamw, strategy)
    with pytest.raises(UserError, match="the ranks' optimizers differ: rank 1 has another kind"):
        cos598d.parallelize(Model(0), lambda p: torch.optim.AdamW(p, lr=0.1 + comm.rank), "zero1")
    with pytest.raises(UsageError, match="Rotated cannot step"):
        cos598d.parallelize(Model(0), Rotated if comm.rank else adamw, "zero1")

    module, optimizer = cos598d.parallelize(Model(0), adamw, "zero3")
    for asked in (module, module.module, next(module.module.children())):  # a script saves the model as with DDP
        with pytest.raises(UserError, match=r"Call full_state_dict\(\) instead of state_dict\(\)"):
            asked.state_dict()
    loss_of(module, comm.rank, 0).backward()
    gradient = module.module.head.output.weight.grad
    assert repr(gradient) == "ShardedGradient(head.output.weight, (3, 31))"
    for read in (lambda: gradient + 1, gradient.abs, lambda: gradient.add_(torch.ones(3, 31))):
        with pytest.raises(UserError, match=r"the complete gradient of head.output.weight, .*clip_grad_norm_\(\)"):
            read()
    with pytest.raises(UsageError, match="Give norm_type 2"):
        module.clip_grad_norm_(1.0, norm_type=torch.inf)
    module.module.frozen.requires_grad_(True)
    with pytest.raises(UsageError, match=r"Call optimizer.add_param_group"):
        module(torch.tensor([[1]]))
    module.module.frozen.requires_grad_(False)
    plainly(module, optimizer, comm.rank, 1)
    module.detach()


def test_wrong_use_raises_the_same_error_on_every_rank():
    run_ranks(2, refuses)


def chooses(comm):
    """An exact strategy, the same on every rank: of shards too, where the optimizer can step them."""
    for make in (adamw, lambda params: Rotated(params, lr=0.05)):
        expected = Model(0)
        reference, single = OneProcess(expected, comm.world_size), make(list(expected.parameters()))
        module, optimizer = cos598d.parallelize(Model(comm.rank), make, "auto")
        choice = module.choice
        assert comm.exchange(choice.sync) == [choice.sync] * comm.world_size
        assert list(choice.predicted.values()) == sorted(choice.predicted.values())
        assert choice.sync == next(iter(choice.predicted))
        assert choice.left_out.keys() >= {"zero3", "local_sgd", "torch_fsdp"}
        assert (choice.left_out.get("zero1") == "the optimizer cannot step shards") == (make is not adamw)
        for step in (0, 2, 3):
            plainly(module, optimizer, comm.rank, step)
            plainly_in_one(reference, single, step)
        assert_as(module.full_state_dict(), expected, choice.sync, within=0.0 if make is adamw else 1e-6)
        module.detach()
    module, _ = cos598d.parallelize(Model(0), adamw, "zero1")
    assert module.choice is None
    module.detach()


@pytest.mark.parametrize("world_size", [2, 3])
def test_auto_chooses_the_same_exact_strategy_on_all_ranks(world_size):
    run_ranks(world_size, chooses)


def has_more_batches(comm, strategy):
    """Rank 1 ends after a step; the other's next one is a sentence, soon."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=6))
    module, optimizer = cos598d.parallelize(Model(0), adamw, strategy, process_group=group, timeout_seconds=5)
    plainly(module, optimizer, comm.rank, 0)
    if comm.rank == 1:
        # As at the end of a script: what is on its way to this rank keeps connections open.
        del module, optimizer, group
        gc.collect()
        torch.distributed.destroy_process_group()
        return None
    with pytest.raises(UserError, match="the same number of batches|did not fill .* within 5 s") as raised:
        plainly(module, optimizer, comm.rank, 1)
    return str(raised.value)


@pytest.mark.long(one_in=5)
@pytest.mark.parametrize("strategy", SHARDS)
def test_rank_with_more_batches_than_another_gets_an_error(strategy):
    assert run_ranks(2, has_more_batches, strategy)[0]


def saves_as_with_ddp(comm):
    """A script that asks the model itself gets the weights after the step, or an error; never those on their way."""
    for strategy in ("zero1", "zero2", "sparse_zero1", "shared_weights", "zero3"):
        module, optimizer = cos598d.parallelize(Model(0), lambda p: torch.optim.SGD(p, lr=0.1), strategy)
        for step in range(3):
            loss_of(module, comm.rank, step).backward()
            optimizer.step()
            if strategy == "zero3":
                module.settle()
            found = {name: value.clone() for name, value in module.module.state_dict().items()}
            for name, value in module.full_state_dict().items():
                assert torch.equal(found[name], value), (strategy, name)
        if strategy != "zero3":  # an average of weights over time is often a copy of the model
            copied = copy.deepcopy(module.module)
            loss_of(module, comm.rank, 3).backward()
            optimizer.step()
            assert all(torch.equal(found[name], value) for name, value in copied.state_dict().items()), strategy
        module.load_state_dict(found)
        module.detach()
        assert all(torch.equal(found[name], value) for name, value in module.module.state_dict().items()), strategy


def test_state_dict_of_the_model_has_the_weights_after_the_step():
    run_ranks(2, saves_as_with_ddp)
