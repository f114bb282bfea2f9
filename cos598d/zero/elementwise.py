"""Which optimizers can step pieces of parameters: those that treat every element by itself."""

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError

SCALES = (1e-8, 1.0, 1e8)  # of gradients: an optimizer may clip by a norm only what is large


def kinds_of_state(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """What the optimizer remembers of a parameter: for each kind of state, whether it is one number.

    A twin steps a matrix whole and in pieces, with tiny, normal and large gradients. Raises UserError if that differs.
    """
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    kinds: dict[str, bool] = {}

    def stepped(place: slice, scale: float, *shape: int) -> torch.Tensor:
        """A piece of the matrix after some steps: a rank's optimizer has one piece in each group, and no other."""
        parts = [nn.Parameter(matrix[place].view(shape).clone()) for _ in optimizer.param_groups]
        groups = [  # the learning rate may be 0 while it is warmed up
            {**group, "params": [part], "lr": 0.1} for group, part in zip(optimizer.param_groups, parts, strict=True)
        ]
        hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
        twin = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer), **hooks, param_groups=groups, state=defaultdict(dict))
        for gradient in gradients:
            for part in parts:
                part.grad = scale * gradient[place].view(shape)
            twin.step()
        state = twin.state[parts[0]].items()
        kinds.update({kind: torch.as_tensor(value).dim() == 0 for kind, value in state if value is not None})
        return torch.stack([part.detach().flatten() for part in parts])

    try:
        for scale in SCALES:
            pieces = torch.cat([stepped(slice(7), scale, -1), stepped(slice(7, 30), scale, -1)], dim=1)
            torch.testing.assert_close(stepped(slice(30), scale, 6, 5), pieces, rtol=1e-9, atol=1e-12)
    except Exception as error:  # of any optimizer, which may be anybody's
        name = type(optimizer).__name__
        raise UserError(
            f"{name} cannot step shards of parameters as it steps whole ones. Take an optimizer that treats every "
            f"element by itself, as SGD and AdamW do, or keep {name} with a sync without shards, such as bucketed."
        ) from error
    return kinds
