"""Claims about the calls that a sync makes, and about attach and detach."""

from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import GRADIENTS
from cos598d.tools.check.claims.base import FEW_STEPS, Claim, OnRank, World, first_few, moment_of
from cos598d.tools.check.comparison import agrees
from cos598d.tools.check.toy import WIDTH


@Claim
def starts_from_rank_0(on: OnRank) -> None:
    """After attach every parameter (frozen ones too) and every buffer has rank 0's values, on every rank."""
    model = on.model(differs=True)
    on.sync().attach(model)
    on.hand_in("after attach", model.state_dict())


@starts_from_rank_0.judgement
def _(world: World) -> None:
    model = world.model()
    buffers, right = dict(model.named_buffers()), model.state_dict()
    parameters = {name: tensor for name, tensor in right.items() if name not in buffers}
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        sentence = f"the {kind} {{name}} differs from rank 0's after attach"
        world.equals("after attach", tensors, sentence, sentence)


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
    on.report("refusal", sentence)


@refuses_different_models.judgement
def _(world: World) -> None:
    odd = world.size - 1
    for rank, sentence in enumerate(world.reported("refusal", str) if odd else ()):
        world.require(sentence != "", "attach took models that differ", rank)
        if sentence:
            names_both = f"rank {odd}" in sentence and "sometimes.weight" in sentence
            world.require(names_both, f"attach's error does not name rank {odd} and sometimes.weight: {sentence}", rank)


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
    on.report("hooks", [name for name in _hooks(model) if name not in before])
    ledger = on.fresh_ledger()
    model(**on.batch(1))[0].backward()
    on.report("calls", len(ledger.rows))
    on.hand_in_gradients("after detach", model)


@lets_go.judgement
def _(world: World) -> None:
    local = world.local([1])
    own = world.handed_in("after detach", dict(world.model().named_parameters()))
    for rank, calls in enumerate(world.reported("calls", int)):
        world.require(calls == 0, f"{calls} calls after detach", rank, "after detach it still communicates")
        hooks = world.reported("hooks", list)[rank]
        world.require(not hooks, f"hooks are left after detach: {first_few(hooks)}", rank, "detach leaves hooks behind")
        for name, gradient in local.ranks[rank].items():
            scale = 0.0 if gradient is None else gradient.abs().max().item()
            is_own = agrees(own[rank][name], gradient, scale)
            world.require(is_own, f"{name}'s gradient is not this rank's own after detach", rank)


def _hooks(model: nn.Module) -> list[str]:
    """The model's modules and parameters, each once per hook on it."""
    of_module = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_parameter = ("_backward_hooks", "_post_accumulate_grad_hooks")
    owners: list[tuple[str, object, tuple[str, ...]]] = []
    owners += [(name or "the model", module, of_module) for name, module in model.named_modules()]
    owners += [(name, parameter, of_parameter) for name, parameter in model.named_parameters()]
    return [
        f"{kind.strip('_')[:-1].replace('_', ' ')} of {name} {number}".removesuffix(" 0")
        for name, owner, kinds in owners
        for kind in kinds
        for number in range(len(getattr(owner, kind, None) or ()))
    ]


@Claim
def waits_for_its_calls(on: OnRank) -> None:
    """When finish returns, no call is still running: each that was started has been waited for."""
    model = on.model()
    sync, module = on.attached(model)
    on.comm.not_waited_for()
    for step in range(FEW_STEPS):
        module(**on.batch(step))[0].backward()
        sync.finish()
        on.report(moment_of("", step), on.comm.not_waited_for())
        model.zero_grad(set_to_none=True)


@waits_for_its_calls.judgement
def _(world: World) -> None:
    for step in range(FEW_STEPS):
        for rank, calls in enumerate(world.reported(moment_of("", step), list)):
            world.require(
                not calls,
                f"{len(calls)} calls are not waited for when finish returns: {', '.join(map(str, calls[:3]))}",
                rank,
                "finish returns while calls are still running: wait for each call that you start with async_op",
            )


@Claim
def goes_through_comm(on: OnRank) -> None:
    """Ranks reach each other only through self.comm, and send all of the gradients' bytes there.

    self.comm counts what is sent. None calls torch.distributed.
    """
    model = on.model()
    sync, module = on.attached(model)
    ledger = on.fresh_ledger()
    module(**on.batch(0))[0].backward()
    sync.finish()
    on.report("payload", sum(row.payload_bytes for row in ledger.rows if row.purpose == GRADIENTS))


@goes_through_comm.judgement
def _(world: World) -> None:
    mean = world.local([0]).mean
    gradient = sum(each.numel() * each.element_size() for each in mean.values() if each is not None)
    for rank, payload in enumerate(world.reported("payload", int)):
        direct = world.evidence[rank].reported("", "direct calls", list)
        cause = "it calls torch.distributed directly, bypassing self.comm" if direct else ""
        world.require(not direct, f"torch.distributed is called, bypassing self.comm: {first_few(direct)}", rank, cause)
        if world.size > 1 and not direct:
            message = f"{payload} bytes were sent through self.comm for {gradient} bytes of gradients"
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
    on.report("calls", [[row.op, row.tensor, list(row.shape)] for row in ledger.rows])
    on.report("sent", sum(row.bytes_sent for row in ledger.rows))
    on.report("received", sum(row.bytes_received for row in ledger.rows))


@calls_in_one_order.judgement
def _(world: World) -> None:
    made = world.reported("calls", list)
    for rank, calls in enumerate(made):
        world.require(calls == made[0], "the ranks' calls differ in number, order or shape", rank)
    sent, received = (sum(world.reported(name, int)) for name in ("sent", "received"))
    is_even = abs(sent - received) <= len(made[0]) * world.size
    world.require(is_even, f"{sent} bytes sent but {received} received")
