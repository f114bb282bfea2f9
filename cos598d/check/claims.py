"""What every gradient sync must keep, as claims that run on real ranks; each is there for a mistake made in practice.

A claim has two sides. On every rank the first drives the sync and hands in what came of it: gradients, weights, facts.
The second runs in the grader's own process, where no student's code does: it computes by itself what is right, from
the trial's nonce, and says what was expected and found. So a sync passes by its values, not by its word.
"""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cos598d.check.toy import LARGE, SMALL, WIDTH, Shape, ToyFeatures, toy_model
from cos598d.check.trial import Claim, OnRank, World, agrees
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import AGREEMENT, GRADIENTS, Ledger
from cos598d.config import RunConfig
from cos598d.errors import UsageError, UserError
from cos598d.measure.record import RunRecord
from cos598d.strategies.replicated import Replicated
from cos598d.sync.base import GradientSync
from cos598d.sync.none import NoSync
from cos598d.terminal.console import Console
from cos598d.train import train

# Of losses and weights after training, relative to the largest.
TRAINING_TOLERANCE = 1e-5
FEW_STEPS, MORE_STEPS = 2, 9


@Claim
def starts_from_rank_0(on: OnRank) -> None:
    """After attach every parameter (frozen ones too) and every buffer has rank 0's values, on every rank."""
    model = on.model(differs=True)
    on.sync().attach(model)
    on.hand_in("after attach", model.state_dict())


@starts_from_rank_0.judgement
def _(world: World) -> None:
    world.equals("after attach", world.model().state_dict(), "{name} differs from rank 0's after attach")


@Claim
def averages_gradients(on: OnRank) -> None:
    """After finish .grad is the mean of all ranks' gradients on every rank, step after step; no weight has changed."""
    for label, options in on.buckets():
        for run, shape, steps in _runs(label):
            model = on.model(shape, differs=True)
            sync, module = on.attached(model, options=options)
            for step in range(steps):
                module(**on.batch(step))[0].backward()
                sync.finish()
                on.hand_in_gradients(_moment(run, step), model)
                model.zero_grad(set_to_none=True)
            on.hand_in(f"weights, {run}", dict(model.named_parameters()))


@averages_gradients.judgement
def _(world: World) -> None:
    for label in world.labels():
        for run, shape, steps in _runs(label):
            weights = dict(world.model(shape).named_parameters())
            sentence = "finish changed the weight {name}: only .grad may change"
            world.equals(f"weights, {run}", weights, sentence, "finish changed weights: only .grad may change")
            for step in range(steps):
                local = world.local([step], shape=shape)
                world.gradients_are(_moment(run, step), local, run=run, step=step, shape=shape)


@Claim
def handles_unused_parameters(on: OnRank) -> None:
    """A parameter that no rank used keeps .grad None; one that some used gets the mean, the others counting as 0."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for step, users in enumerate(_users(on.world_size)):
            module(**on.batch(step, on.rank in users))[0].backward()
            sync.finish()
            on.hand_in_gradients(_used(label, step, users), model)
            model.zero_grad(set_to_none=True)


@handles_unused_parameters.judgement
def _(world: World) -> None:
    for label in world.labels():
        for step, users in enumerate(_users(world.size)):
            world.gradients_are(_used(label, step, users), world.local([step], users), run=label, step=step)


@Claim
def needs_no_agreement(on: OnRank) -> None:
    """Made with find_unused_parameters=False it averages all the same, and makes no call to agree on what was used."""
    model = on.model(ALL_USED)
    sync, module = on.attached(model, find_unused_parameters=False)
    ledger = on.fresh_ledger()
    for step in range(FEW_STEPS):
        module(**on.batch(step))[0].backward()
        sync.finish()
        on.hand_in_gradients(_moment("", step), model)
        model.zero_grad(set_to_none=True)
    on.say("calls to agree", len([row for row in ledger.rows if row.purpose == AGREEMENT]))


@needs_no_agreement.judgement
def _(world: World) -> None:
    for step in range(FEW_STEPS):
        world.gradients_are(_moment("", step), world.local([step], shape=ALL_USED), step=step, shape=ALL_USED)
    for rank, calls in enumerate(world.facts("calls to agree", int)):
        world.require(calls == 0, f"{calls} calls to agree on what is known", rank)


@Claim
def leaves_frozen_weights_alone(on: OnRank) -> None:
    """A frozen weight gets no gradient and does not travel; a weight used in two places travels once."""
    # The same tensors are to be trained in both; only one ties them, and only the other has much that is frozen.
    for name, shape in (("tied", SMALL), ("with more frozen", MORE_FROZEN)):
        model = on.model(shape)
        sync, module = on.attached(model)
        ledger = on.fresh_ledger()
        module(**on.batch(0))[0].backward()
        sync.finish()
        on.say(f"payload, {name}", sum(row.payload_bytes for row in ledger.rows if row.purpose == GRADIENTS))
        on.hand_in(name, {n: p.grad for n, p in model.named_parameters() if not p.requires_grad})


@leaves_frozen_weights_alone.judgement
def _(world: World) -> None:
    for moment, shape in (("tied", SMALL), ("with more frozen", MORE_FROZEN)):
        frozen = {name: p for name, p in world.model(shape).named_parameters() if not p.requires_grad}
        for rank, found in enumerate(world.handed_in(moment, frozen)):
            for name, gradient in found.items():
                world.require(gradient is None, f"the frozen {name} has a gradient", rank)
    tied, more = (world.facts(f"payload, {name}", int) for name in ("tied", "with more frozen"))
    for rank, (once, other) in enumerate(zip(tied, more, strict=True)):
        why = "frozen weights travel" if other > once else "a weight that is used in two places travels twice"
        world.require(
            once == other,
            f"{once} bytes travelled of a model with a tied weight, {other} of one with the same to train and more "
            f"that is frozen: {why}",
            rank,
            why,
        )


@Claim
def accumulates(on: OnRank) -> None:
    """Within no_sync nothing travels; the next finish leaves the mean of the gradients summed over the step's parts."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for first in (0, 2):
            ledger = on.fresh_ledger()
            with sync.no_sync():
                module(**on.batch(first))[0].backward()
            on.say(f"calls, {_moment(label, first)}", len(ledger.rows))
            module(**on.batch(first + 1))[0].backward()
            sync.finish()
            on.hand_in_gradients(_moment(label, first), model)
            model.zero_grad(set_to_none=True)


@accumulates.judgement
def _(world: World) -> None:
    for label in world.labels():
        for first in (0, 2):
            moment = _moment(label, first)
            for rank, calls in enumerate(world.facts(f"calls, {moment}", int)):
                world.require(
                    calls == 0, f"{calls} calls under no_sync ({moment})", rank, "under no_sync it communicates"
                )
            world.gradients_are(moment, world.local([first, first + 1]), run=label, step=first)


@Claim
def accumulates_without_no_sync(on: OnRank) -> None:
    """Two backward passes in a step, with no no_sync around the first, leave the mean of their sum as well."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for first in (0, 2):
            for step in (first, first + 1):
                module(**on.batch(step))[0].backward()
            sync.finish()
            on.hand_in_gradients(_moment(label, first), model)
            model.zero_grad(set_to_none=True)


@accumulates_without_no_sync.judgement
def _(world: World) -> None:
    for label in world.labels():
        for first in (0, 2):
            world.gradients_are(_moment(label, first), world.local([first, first + 1]), run=label, step=first)


@Claim
def waits_for_its_calls(on: OnRank) -> None:
    """When finish returns, no call is under way: each that was started has been waited for."""
    model = on.model()
    sync, module = on.attached(model)
    on.comm.not_waited_for()
    for step in range(FEW_STEPS):
        module(**on.batch(step))[0].backward()
        sync.finish()
        on.say(_moment("", step), on.comm.not_waited_for())
        model.zero_grad(set_to_none=True)


@waits_for_its_calls.judgement
def _(world: World) -> None:
    for step in range(FEW_STEPS):
        for rank, calls in enumerate(world.facts(_moment("", step), list)):
            world.require(
                not calls,
                f"{len(calls)} calls are not waited for when finish returns: {', '.join(map(str, calls[:3]))}",
                rank,
                "finish returns while calls are under way: a call that is started with async_op must be waited for",
            )


@Claim
def goes_through_comm(on: OnRank) -> None:
    """Ranks reach each other through self.comm alone, which counts what travels: none calls torch.distributed."""
    model = on.model()
    sync, module = on.attached(model)
    ledger = on.fresh_ledger()
    module(**on.batch(0))[0].backward()
    sync.finish()
    on.say("payload", sum(row.payload_bytes for row in ledger.rows if row.purpose == GRADIENTS))


@goes_through_comm.judgement
def _(world: World) -> None:
    mean = world.local([0]).mean
    gradient = sum(each.numel() * each.element_size() for each in mean.values() if each is not None)
    for rank, payload in enumerate(world.facts("payload", int)):
        direct = world.evidence[rank].fact("", "direct calls", list)
        cause = "it calls torch.distributed, round self.comm" if direct else ""
        world.require(not direct, f"torch.distributed is called, round self.comm: {_few(direct)}", rank, cause)
        if world.size > 1 and not direct:
            message = f"{payload} bytes travelled through self.comm for {gradient} bytes of gradients"
            world.require(payload >= gradient, message, rank)


@Claim
def calls_in_one_order(on: OnRank) -> None:
    """Every rank makes the same calls in the same order, and together they receive what they send."""
    model = on.model()
    sync, module = on.attached(model)
    ledger = on.fresh_ledger()
    for step in range(2):
        module(**on.batch(step, on.rank == 0))[0].backward()
        sync.finish()
    on.say("calls", [[row.op, row.tensor, list(row.shape)] for row in ledger.rows])
    on.say("sent", sum(row.bytes_sent for row in ledger.rows))
    on.say("received", sum(row.bytes_received for row in ledger.rows))


@calls_in_one_order.judgement
def _(world: World) -> None:
    made = world.facts("calls", list)
    for rank, calls in enumerate(made):
        world.require(calls == made[0], "the ranks' calls differ in number, order or shape", rank)
    sent, received = (sum(world.facts(name, int)) for name in ("sent", "received"))
    is_even = abs(sent - received) <= len(made[0]) * world.size
    world.require(is_even, f"{sent} bytes sent but {received} received")


@Claim
def refuses_different_models(on: OnRank) -> None:
    """When one rank's model differs, attach raises UserError on every rank and names that rank and the parameter."""
    model = on.model()
    if on.rank == on.world_size - 1 and on.rank:
        model.sometimes = nn.Linear(WIDTH, WIDTH + 1)
    sentence = ""
    try:
        on.sync().attach(model)
    except UserError as error:
        sentence = str(error)
    on.say("refusal", sentence)


@refuses_different_models.judgement
def _(world: World) -> None:
    odd = world.size - 1
    for rank, sentence in enumerate(world.facts("refusal", str) if odd else ()):
        world.require(sentence != "", "attach took models that differ", rank)
        if sentence:
            names_both = f"rank {odd}" in sentence and "sometimes.weight" in sentence
            world.require(names_both, f"names not rank {odd} and sometimes.weight: {sentence}", rank)


@Claim
def lets_go(on: OnRank) -> None:
    """After detach the model is the user's own again: no hook is left, backward makes no call, .grad is this rank's."""
    model = on.model()
    before = _hooks(model)
    sync, module = on.attached(model)
    module(**on.batch(0))[0].backward()
    sync.finish()
    sync.detach()
    del module
    model.zero_grad(set_to_none=True)
    on.say("hooks", [name for name in _hooks(model) if name not in before])
    ledger = on.fresh_ledger()
    model(**on.batch(1))[0].backward()
    on.say("calls", len(ledger.rows))
    on.hand_in_gradients("after detach", model)


@lets_go.judgement
def _(world: World) -> None:
    local = world.local([1])
    own = world.handed_in("after detach", dict(world.model().named_parameters()))
    for rank, calls in enumerate(world.facts("calls", int)):
        world.require(calls == 0, f"{calls} calls after detach", rank, "after detach it still communicates")
        hooks = world.facts("hooks", list)[rank]
        world.require(not hooks, f"hooks are left after detach: {_few(hooks)}", rank, "detach leaves hooks behind")
        for name, gradient in local.ranks[rank].items():
            scale = 0.0 if gradient is None else gradient.abs().max().item()
            is_own = agrees(own[rank][name], gradient, scale)
            world.require(is_own, f"{name}'s gradient is not this rank's own after detach", rank)


@Claim
def trains_like_one_process(on: OnRank) -> None:
    """Training on n ranks gives the losses and weights of one process on the whole batch.

    THE loop: clipping bites, the last batch is uneven and smaller than the world, ranks start from different weights,
    and a step may come in parts. With SGD too: the steps of AdamW, and clipped ones, hardly know a gradient's scale.
    """
    for training in TRAININGS:
        model = on.model(differs=True)
        losses = _train(training, model, on.sync(), on.comm, on.folder)
        on.say(f"losses, {training.name}", losses)
        on.hand_in(training.name, dict(model.named_parameters()))


@trains_like_one_process.judgement
def _(world: World) -> None:
    for training in TRAININGS:
        expected_losses, expected = _alone(training, world.nonce)
        weights = world.handed_in(training.name, expected)
        for rank, losses in enumerate(world.facts(f"losses, {training.name}", list)):
            numbers = len(losses) == len(expected_losses) and all(isinstance(loss, float) for loss in losses)
            world.require(numbers, f"{len(losses)} losses where {len(expected_losses)} belong", rank)
            worst = max(abs(a - b) for a, b in zip(losses, expected_losses)) if numbers else 0.0
            bound = TRAINING_TOLERANCE * max(expected_losses)
            world.require(worst < bound, f"losses differ from one process's by {worst:.1e} ({training.name})", rank)
            for name, tensor in expected.items():
                worst = _worst(weights[rank][name], tensor)
                world.require(
                    worst < TRAINING_TOLERANCE,
                    f"{name} differs from one process's by {worst:.1e} ({training.name})",
                    rank,
                )


CLAIMS: tuple[Claim, ...] = (
    starts_from_rank_0,
    averages_gradients,
    handles_unused_parameters,
    needs_no_agreement,
    leaves_frozen_weights_alone,
    accumulates,
    accumulates_without_no_sync,
    waits_for_its_calls,
    goes_through_comm,
    calls_in_one_order,
    refuses_different_models,
    lets_go,
    trains_like_one_process,
)
ALL_USED = Shape(all_used=True)
MORE_FROZEN = Shape(is_tied=False, more_frozen=1_013)


def claims_of(sync: type[GradientSync]) -> tuple[Claim, ...]:
    """The claims that a registered sync makes: all, or where it says `exact = False` those that its `claims` names."""
    if sync.exact:
        return CLAIMS
    unknown = set(sync.claims) - {claim.name for claim in CLAIMS}
    if unknown:
        raise UsageError(f"{sync.__name__} claims {min(unknown)}, and there is no such claim in cos598d.check.claims.")
    return tuple(claim for claim in CLAIMS if claim.name in sync.claims)


@dataclass(frozen=True)
class _Training:
    name: str
    optimizer: str
    learning_rate: float
    max_grad_norm: float
    parts: int = 1
    momentum: float = 0.0


TRAININGS = (
    _Training("AdamW, clipped", "adamw", 0.01, 0.3),  # the toy's gradients have norms above 1
    _Training("SGD", "sgd", 0.05, 0.0),
    _Training("SGD with momentum, clipped, 2 parts a step", "sgd", 0.1, 0.3, parts=2, momentum=0.9),
)


def _train(training: _Training, model: nn.Module, sync: GradientSync, comm: Communicator, folder: Path) -> list[float]:
    config = RunConfig(
        do_train=True,
        total_train_batch_size=8,
        gradient_accumulation_steps=training.parts,
        num_train_epochs=1,
        optimizer=training.optimizer,
        momentum=training.momentum,
        learning_rate=training.learning_rate,
        max_grad_norm=training.max_grad_norm,
        adam_epsilon=1e-3,  # with a small one Adam turns rounding noise in near-zero gradients into whole steps
        warmup_steps=1,
    )
    with RunRecord(folder, comm.rank) as record:
        comm.ledger = record.ledger
        train(model, Replicated(sync), comm, ToyFeatures(26), config, record, Console("", speaks=False), dict)
    comm.ledger = Ledger()
    return record.losses


@functools.lru_cache(maxsize=16)
def _alone(training: _Training, nonce: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    alone, model = Communicator(None, "gloo", torch.device("cpu")), toy_model(nonce)
    with tempfile.TemporaryDirectory() as folder:
        losses = _train(training, model, NoSync(alone), alone, Path(folder))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _hooks(model: nn.Module) -> list[str]:
    """The model's modules and parameters, each once for every hook on it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    owners = [(name or "the model", module, kinds) for name, module in model.named_modules()]
    owners += [(name, p, ("_backward_hooks", "_post_accumulate_grad_hooks")) for name, p in model.named_parameters()]
    return [
        f"{kind.strip('_')[:-1].replace('_', ' ')} of {name} {number}".removesuffix(" 0")
        for name, owner, kinds_of in owners
        for kind in kinds_of
        for number in range(len(getattr(owner, kind, None) or ()))
    ]


def _worst(found: torch.Tensor | None, right: torch.Tensor) -> float:
    return float("inf") if found is None else (found - right).abs().max().item()


def _runs(label: str) -> tuple[tuple[str, Shape, int], ...]:
    """Names, shapes, steps. Long tensors once, many steps once: mistakes in cutting show at once, a warm-up's late."""
    if label:
        return ((label, SMALL, FEW_STEPS),)
    return ("long tensors", LARGE, FEW_STEPS), ("", SMALL, MORE_STEPS)


def _users(world_size: int) -> tuple[set[int], ...]:
    return {0}, {world_size - 1}, set()


def _used(label: str, step: int, users: set[int]) -> str:
    return f"{_moment(label, step)}, `sometimes` used on ranks {sorted(users)}"


def _moment(run: str, step: int) -> str:
    return ", ".join(part for part in (run, f"step {step}") if part)


def _few(names: list) -> str:
    return ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
