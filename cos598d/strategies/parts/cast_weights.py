"""The weights of linear layers in half precision, cast once per step, in memory that all ranks of a host share."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cos598d.strategies.parts.units import Unit


class CastWeights:
    """Makes autocast's half-precision copies of weights once per step and once for all ranks, not in every forward.

    1. Copies in half precision are stored next to a unit's float32 weights. A rank casts its part of them after its
       optimizer has stepped its part of the weights (`refresh`).
    2. While a linear layer computes under autocast, its copies replace its weights. They have the same bits that
       autocast would produce.
    3. The gradient that backward computes for a copy is in half precision, too. Autocast would convert it to a float32
       tensor. Here it is passed on (`receive`), and converted when it is added up. The results are autocast's own, and
       three passes over memory are saved.

    Autocast casts a weight without a copy: one with a second user, or of a layer with its own forward.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        copies: Mapping[Unit, torch.Tensor],
        receive: Callable[[nn.Parameter, torch.Tensor], None],
    ):
        """copies: memory for each unit, (elements,). `receive` is called with a parameter and its gradient."""
        self._receive = receive
        self._handles: list[RemovableHandle] = []
        self.own = {unit: unit.parts(memory)[rank] for unit, memory in copies.items()}
        layers = linear_layers(model)
        halves: dict[nn.Parameter, nn.Parameter] = {}
        for unit, memory in copies.items():
            for view, (_, p) in zip(unit.views(memory), unit.parameters, strict=True):
                if p in layers:
                    # .data: autograd then watches for changes in this memory only.
                    halves[p] = nn.Parameter(view.data)
                    self._handles.append(halves[p].register_post_accumulate_grad_hook(self._handing_on(p)))
        for layer in dict.fromkeys(layers.values()):
            own = {name: p for name, p in layer.named_parameters(recurse=False) if p in halves}
            self._handles.append(
                layer.register_forward_pre_hook(_putting({n: halves[p] for n, p in own.items()}, True))
            )
            self._handles.append(layer.register_forward_hook(_putting(own), always_call=True))

    def refresh(self, unit: Unit, own: torch.Tensor) -> None:
        """Cast this rank's part of the unit's weights, (own part's elements,), after it has changed."""
        if unit in self.own:
            self.own[unit].copy_(own)

    def detach(self) -> None:
        """Remove the hooks from the layers."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.own = [], {}

    def _handing_on(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def hand_on(half: torch.Tensor) -> None:
            gradient, half.grad = half.grad, None
            if gradient is not None:
                self._receive(parameter, gradient)

        return hand_on


def linear_layers(model: nn.Module) -> dict[nn.Parameter, nn.Linear]:
    """The trainable float32 weights that only one linear layer has, each with that layer."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            users.setdefault(p, []).append(module)
    return {
        p: module
        for p, (module, *others) in users.items()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not others
        and p.requires_grad
        and p.dtype == torch.float32
    }


def _putting(parameters: Mapping[str, nn.Parameter], under_autocast_alone: bool = False) -> Callable[..., None]:
    """A hook that replaces a layer's parameters of these names by these."""

    def put(layer: nn.Module, *_: object) -> None:
        if torch.is_autocast_enabled("cpu") or not under_autocast_alone:
            layer._parameters.update(parameters)

    return put
