"""Claims about taking a model over and letting go of it: `attach` and `detach`."""

from torch import nn

from cos598d.errors import UserError
from cos598d.tools.check.claims.base import Claim, OnRank, World, first_few
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
