"""The optimizer's state under the model's plain names, so that any strategy on any number of ranks can load it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cos598d.heart.parallel import Parallel


def optimizer_pieces(parallel: "Parallel") -> Iterator[tuple[str, torch.Tensor]]:
    """What an optimizer of whole parameters remembers: ("exp_avg/NAME", tensor) and so on."""
    for name, p in parallel.module.named_parameters():
        for kind, value in parallel.optimizer.state.get(p, {}).items():
            yield f"{kind}/{name}", torch.as_tensor(value)


def load_optimizer(parallel: "Parallel", state: dict[str, torch.Tensor]) -> None:
    """Let it remember what `optimizer_pieces` gave."""
    for name, p in parallel.module.named_parameters():
        for key, value in of_parameter(state, name):
            parallel.optimizer.state[p][key] = value.to(p.device if value.dim() else "cpu", copy=True)


def of_parameter(state: dict[str, torch.Tensor], name: str) -> list[tuple[str, torch.Tensor]]:
    """The kinds of optimizer state that a parameter has, with their values."""
    found = [(key.partition("/")[0], value) for key, value in state.items() if key.partition("/")[2] == name]
    return [(kind, value) for kind, value in found if kind not in ("weights", "buffers")]
