"""What every gradient sync must keep, as claims that run on real ranks; each is there for a mistake made in practice.

A claim is called on every rank with a communicator of the world and a function that makes the sync; it returns when
it holds and raises AssertionError, saying what was expected and found, when it does not.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from cos598d.comm import Communicator
from cos598d.config import RunConfig
from cos598d.console import Console
from cos598d.errors import UsageError, UserError
from cos598d.measure.ledger import AGREEMENT, GRADIENTS, Ledger
from cos598d.measure.record import RunRecord
from cos598d.sync.base import GradientSync
from cos598d.sync.none import NoSync
from cos598d.toy import WIDTH, ToyFeatures, ToyModel, local_batch, toy_model
from cos598d.train import train

MakeSync = Callable[..., GradientSync]  # of a communicator and, if need be, find_unused_parameters
Claim = Callable[[MakeSync, Communicator, Path], None]

# Rounding differs with the order of summation; a mistake of substance is orders of magnitude larger.
TOLERANCE = 1e-6


def starts_from_rank_0(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """After attach every parameter (frozen ones too) and every buffer has rank 0's values, on every rank."""
    model, expected = toy_model(seed=comm.rank), toy_model(seed=0).state_dict()
    make_sync(comm).attach(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), f"{name} differs from rank 0's after attach"


def averages_gradients(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """After finish .grad is the mean of all ranks' gradients on every rank, step after step; no weight has changed."""
    model = toy_model(seed=comm.rank)
    sync = make_sync(comm)
    module = _attach(sync, model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(3):
        module(**local_batch(comm.rank, step))[0].backward()
        sync.finish()
        _assert_gradients(model, _mean_gradients(comm, [step]), f"step {step}")
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), f"finish changed the weight {name}: only .grad may change"
        model.zero_grad(set_to_none=True)


def handles_unused_parameters(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """A parameter that no rank used keeps .grad None; one that some used gets the mean, the others counting as 0."""
    model = toy_model(seed=0)
    sync = make_sync(comm)
    module = _attach(sync, model)
    for step, users in enumerate(({0}, {comm.world_size - 1}, set())):
        module(**local_batch(comm.rank, step, comm.rank in users))[0].backward()
        sync.finish()
        expected = _mean_gradients(comm, [step], users)
        _assert_gradients(model, expected, f"`sometimes` used on ranks {sorted(users)}")
        model.zero_grad(set_to_none=True)


def needs_no_agreement(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """Made with find_unused_parameters=False it averages all the same, and makes no call to agree on what was used."""
    model, expected = (_all_used(toy_model(seed=0)) for _ in range(2))
    sync = make_sync(comm, find_unused_parameters=False)
    module = _attach(sync, model)
    comm.ledger = Ledger()
    for step in range(3):
        module(**local_batch(comm.rank, step))[0].backward()
        sync.finish()
        for rank in range(comm.world_size):
            (expected(**local_batch(rank, step))[0] / comm.world_size).backward()
        _assert_gradients(model, {name: p.grad for name, p in expected.named_parameters()}, f"step {step}")
        for each in (model, expected):
            each.zero_grad(set_to_none=True)
    agreed = [row for row in comm.ledger.rows if row.purpose == AGREEMENT]
    assert not agreed, f"{len(agreed)} calls to agree on what is known"


def leaves_frozen_weights_alone(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """A frozen weight gets no gradient and does not travel; a weight used in two places travels once."""
    model = toy_model(seed=0)
    sync = make_sync(comm)
    module = _attach(sync, model)
    comm.ledger = Ledger()
    module(**local_batch(comm.rank, 0))[0].backward()
    sync.finish()
    assert model.frozen.weight.grad is None, "the frozen layer has a gradient"
    payload = sum(row.payload_bytes for row in comm.ledger.rows if row.purpose == GRADIENTS)
    used = sum(p.numel() * p.element_size() for p in model.parameters() if p.grad is not None)
    trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # DDP's buckets carry the unused layer too; gather and scatter carry each gradient twice.
    whole = [size * passes for size in (used, trainable) for passes in (1, 2)]
    if comm.world_size > 1:
        assert payload in whole, f"{payload} bytes travelled through self.comm for {used} bytes of gradients"


def accumulates(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """Within no_sync nothing travels; the next finish leaves the mean of the gradients summed over the step's parts."""
    model = toy_model(seed=0)
    sync = make_sync(comm)
    module = _attach(sync, model)
    for first in (0, 2):
        comm.ledger = Ledger()
        with sync.no_sync():
            module(**local_batch(comm.rank, first))[0].backward()
        assert not comm.ledger.rows, f"{len(comm.ledger.rows)} calls under no_sync"
        module(**local_batch(comm.rank, first + 1))[0].backward()
        sync.finish()
        _assert_gradients(model, _mean_gradients(comm, [first, first + 1]), "two micro-batches")
        model.zero_grad(set_to_none=True)


def calls_in_one_order(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """Every rank makes the same calls in the same order, and together they receive what they send."""
    model = toy_model(seed=0)
    sync = make_sync(comm)
    module = _attach(sync, model)
    comm.ledger = Ledger()
    for step in range(2):
        module(**local_batch(comm.rank, step, comm.rank == 0))[0].backward()
        sync.finish()
    made = [[row.op, row.tensor, list(row.shape)] for row in comm.ledger.rows]
    moved = [sum(row.bytes_sent for row in comm.ledger.rows), sum(row.bytes_received for row in comm.ledger.rows)]
    everyone = comm.exchange([made, moved])
    assert all(calls == made for calls, _ in everyone), "the ranks' calls differ in number, order or shape"
    sent, received = (sum(moved[place] for _, moved in everyone) for place in (0, 1))
    assert abs(sent - received) <= len(made) * comm.world_size, f"{sent} bytes sent but {received} received"


def refuses_different_models(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """When one rank's model differs, attach raises UserError on every rank and names that rank and the parameter."""
    if comm.world_size == 1:
        return
    model = toy_model(seed=0)
    odd = comm.world_size - 1
    if comm.rank == odd:
        model.sometimes = nn.Linear(WIDTH, WIDTH + 1)
    try:
        make_sync(comm).attach(model)
    except UserError as error:
        sentence = str(error)
    else:
        raise AssertionError("attach took models that differ")
    assert f"rank {odd}" in sentence, sentence
    assert "sometimes.weight" in sentence, sentence


def lets_go(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """After detach the model is the user's own again: backward makes no call, and .grad keeps this rank's gradient."""
    model = toy_model(seed=0)
    sync = make_sync(comm)
    module = _attach(sync, model)
    module(**local_batch(comm.rank, 0))[0].backward()
    sync.finish()
    sync.detach()
    del module
    model.zero_grad(set_to_none=True)
    comm.ledger = Ledger()
    model(**local_batch(comm.rank, 1))[0].backward()
    assert not comm.ledger.rows, "calls after detach"
    local = toy_model(seed=0)
    local(**local_batch(comm.rank, 1))[0].backward()
    _assert_gradients(model, {name: p.grad for name, p in local.named_parameters()}, "after detach")


def trains_like_one_process(make_sync: MakeSync, comm: Communicator, folder: Path) -> None:
    """Training on n ranks gives the losses and weights of one process on the whole batch.

    THE loop: clipping bites, the last batch is uneven and smaller than the world, ranks start from different weights,
    and a step may come in parts.
    """
    for parts in (1, 2):
        losses, weights = _train(make_sync(comm), comm, folder, parts, seed=comm.rank)
        alone = Communicator(None, "gloo", comm.device)
        expected_losses, expected = _train(NoSync(alone), alone, folder, parts, seed=0)
        worst = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
        assert worst < 10 * TOLERANCE, f"losses differ from one process's by {worst:.1e} ({parts} parts a step)"
        for name, tensor in weights.items():
            worst = (tensor - expected[name]).abs().max().item()
            assert worst < 10 * TOLERANCE, f"{name} differs from one process's by {worst:.1e} ({parts} parts a step)"


CLAIMS: tuple[Claim, ...] = (
    starts_from_rank_0,
    averages_gradients,
    handles_unused_parameters,
    needs_no_agreement,
    leaves_frozen_weights_alone,
    accumulates,
    calls_in_one_order,
    refuses_different_models,
    lets_go,
    trains_like_one_process,
)


def claims_of(sync: type[GradientSync]) -> tuple[Claim, ...]:
    """The claims that a sync must keep: all of them, or where it says `exact = False` those that its `claims` names."""
    if sync.exact:
        return CLAIMS
    unknown = set(sync.claims) - {claim.__name__ for claim in CLAIMS}
    if unknown:
        raise UsageError(f"{sync.__name__} claims {min(unknown)}, and there is no such claim in cos598d.conformance.")
    return tuple(claim for claim in CLAIMS if claim.__name__ in sync.claims)


def _attach(sync: GradientSync, model: nn.Module) -> nn.Module:
    module = sync.attach(model)
    assert callable(module), f"attach returned {module!r} and should return the module to call in the model's place"
    return module


def _all_used(model: ToyModel) -> ToyModel:
    for layer in (model.never, model.sometimes):
        layer.requires_grad_(False)
    return model


def _train(
    sync: GradientSync, comm: Communicator, folder: Path, parts: int, seed: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = RunConfig(
        do_train=True,
        total_train_batch_size=8,
        gradient_accumulation_steps=parts,
        num_train_epochs=1,
        learning_rate=0.01,
        max_grad_norm=0.3,  # the toy's gradients are around 1
        adam_epsilon=1e-3,  # with a small one Adam turns rounding noise in near-zero gradients into whole steps
        warmup_steps=1,
    )
    model = toy_model(seed=seed)
    with RunRecord(folder, comm.rank) as record:
        comm.ledger = record.ledger
        train(model, sync, comm, ToyFeatures(26), config, record, Console("", speaks=False), dict)
    comm.ledger = Ledger()
    return record.losses, model.state_dict()


def _mean_gradients(
    comm: Communicator, steps: list[int], users: set[int] | None = None
) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of the gradients of `steps`, computed by this rank alone from rank 0's first weights."""
    model = toy_model(seed=0)
    for rank in range(comm.world_size):
        for step in steps:
            loss = model(**local_batch(rank, step, users is None or rank in users))[0]
            (loss / comm.world_size).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor | None], when: str) -> None:
    for name, parameter in model.named_parameters():
        found, wanted = parameter.grad, expected[name]
        has, should = (f"{'no' if gradient is None else 'a'} gradient" for gradient in (found, wanted))
        assert has == should, f"{name} has {has} and should have {should} ({when})"
        if found is not None:
            worst = (found - wanted).abs().max().item()
            # A comparison with NaN is false, so NaN fails too.
            assert worst < TOLERANCE, f"{name}'s gradient is off the mean over ranks by {worst:.1e} ({when})"
