"""AdamW of an embedding's rows that ever had a gradient: it would change nothing of the others but their decay."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

MOST = 0.5  # of the rows: where more have had a gradient, picking them out costs more than it saves


class RowSteps:
    """Has an optimizer step those rows of a parameter alone.

    The moments of a row that never had a gradient are zeros, and so is its gradient: all that AdamW (Loshchilov and
    Hutter, arXiv 1711.05101) does to its weights is decay, w (1 - rate x decay), and nothing where that is 0. A
    vocabulary has many rows that a corpus never asks for, and more that it has not asked for yet: to read and write
    their weights, gradients and moments is most of what a step costs. The others move on in every step, with a gradient
    of zeros too, by their momentum.

    1. The rows that have moved are those whose moments are not zeros, looked up once, and those with a gradient since.
    2. For the optimizer's step they stand alone, one after the other, in place of the whole parameter, its gradient and
       its moments; after it each goes back to its place.
    Where more than half of the rows have moved, with another optimizer than AdamW, with an epsilon of 0, which makes
    numbers of zeros that are none, and on GPUs, whose kernels round a decay otherwise, everything is stepped.
    Cost: with m rows moved, four times m rows are read and three written back, within the step in memory of its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, width: int):
        """parameter: (rows x width,), one of the optimizer's."""
        self._optimizer, self._parameter, self._width = optimizer, parameter, width
        self._group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        self._moved: torch.Tensor | None = None  # (rows,) bool; None: the moments say it

    def forget(self) -> None:
        """The moments have changed otherwise than by a step."""
        self._moved = None

    @contextlib.contextmanager
    def alone(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Within it the optimizer's step is one of the rows that have moved.

        rows: (rows,) bool, where the gradient is anything but zeros; None: not known.
        """
        p = self._parameter
        state = self._optimizer.state.get(p, {})
        moments = {kind: value for kind, value in state.items() if torch.is_tensor(value) and value.shape == p.shape}
        is_adamw = type(self._optimizer) is torch.optim.AdamW and self._group["eps"] > 0
        if p.grad is None or not moments or not is_adamw or p.device.type != "cpu":
            yield  # before the first step there are no moments
            return
        gradient, weights = p.grad, p.data
        if self._moved is None:
            self._moved = torch.stack([self._not_zero(moment) for moment in moments.values()]).any(dim=0)
        self._moved |= self._not_zero(gradient) if rows is None else rows
        places = self._moved.nonzero().flatten()
        if len(places) > MOST * len(self._moved):
            yield
            return
        p.grad, p.data = None, self._picked(weights, places)
        p.grad = self._picked(gradient, places)
        state.update({kind: self._picked(moment, places) for kind, moment in moments.items()})
        try:
            yield
            if decay := self._group["lr"] * self._group["weight_decay"]:
                weights.mul_(1 - decay)  # of those that have moved too, whose new values come now
            for whole, part in [(weights, p.data), *((moments[kind], state[kind]) for kind in moments)]:
                self._by_rows(whole).index_copy_(0, places, self._by_rows(part))
        finally:
            p.grad, p.data = None, weights
            p.grad = gradient
            state.update(moments)

    def _by_rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(-1, self._width)

    def _picked(self, flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self._by_rows(flat).index_select(0, places).view(-1)

    def _not_zero(self, flat: torch.Tensor) -> torch.Tensor:
        return self._by_rows(flat).ne(0).any(dim=1)
