"""A model's layers: the modules that are called as units, so that their weights can be brought just before."""

from collections.abc import Sequence

from torch import nn

from cos598d.errors import UserError
from cos598d.zero.unit import Unit

LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def owners(model: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """The layer that has each parameter: a member of the model's outermost lists, or a child next to such a list.

    The model itself has those of no layer, those of several (tied weights), and what is inside of code that
    `module.compile()` has compiled: a hook there would be compiled too.
    """
    users: dict[nn.Parameter, list[nn.Module]] = {p: [] for p in model.parameters()}

    def walk(module: nn.Module, is_member: bool) -> None:
        if module._compiled_call_impl is not None:
            return
        is_called = type(module).forward is not nn.Module.forward
        has_lists = any(isinstance(part, LISTS) for part in module.modules())
        is_leaf = is_member or hasattr(module, "_orig_mod") or not has_lists
        if module is not model and is_called and is_leaf:
            for p in module.parameters():
                users[p].append(module)
            return
        for child in module.children():
            walk(child, isinstance(module, LISTS))

    if not hasattr(model, "_orig_mod"):  # as torch.compile(model) returns it
        walk(model, False)
    return {p: layers[0] if len(layers) == 1 else model for p, layers in users.items()}


def by_layer(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """The units of each layer's parameters."""
    layer_of, found = owners(model), dict[nn.Module, list[Unit]]()
    for unit in units:
        for layer in dict.fromkeys(layer_of[p] for p in unit.views):
            found.setdefault(layer, []).append(unit)
    return found


def refuse_max_norm(model: nn.Module) -> None:
    """Raise UserError if a forward of the model changes weights: the ranks that own them would not see it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"{name or 'the model'} has max_norm, so its forward changes the rows that this rank looks up, and "
                "other ranks would not learn it. Set max_norm to None and scale the rows after optimizer.step()."
            )
