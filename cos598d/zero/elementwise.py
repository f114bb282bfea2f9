"""Which optimizers can step pieces of parameters: those that treat every element by itself."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
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
    name, found = type(optimizer).__name__, dict[str, Any]()
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)

    def stepped(cut: Callable[[torch.Tensor], Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        """The matrix after some steps: a rank's optimizer has one of its pieces in each group, and no other."""
        results = []
        for place, values in enumerate(cut(matrix)):
            parts = [nn.Parameter(values.clone()) for _ in optimizer.param_groups]
            twin = twin_of(optimizer, [[part] for part in parts])
            for group in twin.param_groups:
                group["lr"] = 0.1  # it may be 0 while it is warmed up
            for gradient in gradients:
                for part in parts:
                    part.grad = cut(gradient * scale)[place].clone()
                twin.step()
            found.update(twin.state.get(parts[0], {}))
            results.append(torch.stack([part.detach().flatten() for part in parts]))
        return torch.cat(results, dim=1)

    why = ""
    try:
        for scale in SCALES:
            whole, pieces = stepped(lambda t: [t], scale), stepped(lambda t: t.flatten().split([7, 23]), scale)
            if not torch.allclose(whole, pieces, rtol=1e-9, atol=1e-12):
                why = f"it steps a matrix otherwise in pieces than whole, with gradients of about {scale:g}"
    except Exception as error:  # of any optimizer, which may be anybody's
        why = first_line(error)
    if why:
        raise UserError(
            f"{name} cannot step shards of parameters: {why}. Take an optimizer that treats every element by itself, "
            f"as SGD and AdamW do, or keep {name} with a sync without shards, such as bucketed."
        )
    return found
