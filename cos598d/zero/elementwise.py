"""Which optimizers can step pieces of parameters: those that treat every element by itself."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError, first_line

SCALES = (1e-8, 1.0, 1e8)  # of gradients: an optimizer may clip by a norm only what is large


def twin_of(optimizer: torch.optim.Optimizer, parameters: Sequence[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer of the same class and options without a memory, for other parameters, a list for each group."""
    twin = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, parameters, strict=True)]
    vars(twin).update({**vars(optimizer), **hooks, "param_groups": groups, "state": defaultdict(dict)})
    return twin


def check_elementwise(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer remembers of a parameter: a value for each kind of state.

    A matrix is stepped whole and in pieces, with tiny, normal and large gradients. Raises UserError if that differs.
    """
    name, why, found = type(optimizer).__name__, "", dict[str, Any]()
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(4, 30, generator=generator, dtype=torch.float64)

    def stepped(shape: tuple[int, ...], place: slice, scale: float) -> torch.Tensor:
        """A piece of the matrix after some steps: a rank's optimizer has one piece in each group, and no other."""
        parts = [nn.Parameter(matrix[place].reshape(shape).clone()) for _ in optimizer.param_groups]
        twin = twin_of(optimizer, [[part] for part in parts])
        for group in twin.param_groups:
            group["lr"] = 0.1  # it may be 0 while it is warmed up
        for gradient in gradients:
            for part in parts:
                part.grad = scale * gradient[place].reshape(shape)
            twin.step()
        found.update(twin.state.get(parts[0], {}))
        return torch.stack([part.detach().flatten() for part in parts])

    try:
        for scale in SCALES:
            pieces = [stepped((-1,), place, scale) for place in (slice(7), slice(7, 30))]
            if not torch.allclose(stepped((6, 5), slice(30), scale), torch.cat(pieces, dim=1), rtol=1e-9, atol=1e-12):
                why = f"it steps a matrix otherwise in pieces than whole, with gradients of about {scale:g}"
    except Exception as error:  # of any optimizer, which may be anybody's
        why = first_line(error)
    if why:
        raise UserError(
            f"{name} cannot step shards of parameters: {why}. Take an optimizer that treats every element by itself, "
            f"as SGD and AdamW do, or keep {name} with a sync without shards, such as bucketed."
        )
    return found
