"""A training's tensors under the model's plain names, whole: what any sync gives, any other can load.

weights/NAME   a parameter            buffers/NAME   a buffer
KIND/NAME      what the optimizer remembers of a parameter, such as exp_avg/NAME; of some kinds it is one number
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from cos598d.errors import UserError

OF_MODEL = ("weights", "buffers")


def model_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Its weights and buffers, as they lie in memory."""
    for kind, named in zip(OF_MODEL, (model.named_parameters(), model.named_buffers()), strict=True):
        yield from ((f"{kind}/{name}", tensor.detach()) for name, tensor in named)


@torch.no_grad()
def load_model(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy them into the model. Raises UserError, before anything has changed, if one is missing or does not fit."""
    own = dict(model_state(model))
    for key, tensor in own.items():
        if key not in state or state[key].shape != tensor.shape:
            has = f"one of the shape {tuple(state[key].shape)}" if key in state else "none"
            raise UserError(
                f"the model has {key} of the shape {tuple(tensor.shape)}, and the state has {has}. Load it into the "
                "model that it is from."
            )
    for key, tensor in own.items():
        tensor.copy_(state[key])


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What an optimizer of whole parameters remembers."""
    for name, p in model.named_parameters():
        for kind, value in optimizer.state.get(p, {}).items():
            if value is not None:
                yield f"{kind}/{name}", torch.as_tensor(value)


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Let it remember copies of what `optimizer_state` gave, and nothing else."""
    found = by_parameter(state)
    remember(optimizer, {p: found.get(name, {}) for name, p in model.named_parameters()})


def remember(optimizer: torch.optim.Optimizer, state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> None:
    """Let it remember copies of these of each parameter, by kind, on the devices where torch has them."""
    every = enumerate(p for group in optimizer.param_groups for p in group["params"])
    copies = {place: {kind: value.clone() for kind, value in state[p].items()} for place, p in every if state.get(p)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": copies})


def by_parameter(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's part of a state: for each parameter's name its kinds, with their values."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        if kind not in OF_MODEL:
            found.setdefault(name, {})[kind] = value
    return found
