"""AdamW on only the embedding rows that ever had a gradient: the other rows change by weight decay only."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

MOST = 0.5  # the share of rows: if more have had a gradient, selecting them costs more than it saves


class RowSteps:
    """Makes an optimizer step only those rows of a parameter.

    A row that never had a gradient has zero moments. AdamW (Loshchilov and Hutter, arXiv 1711.05101) changes its
    weights by decay only, w (1 - rate x decay), and not at all without decay. Many rows of a vocabulary never occur in
    a corpus, or not yet. Reading and writing their weights, gradients and moments is most of a step's cost. Rows that
    once had a gradient move in every step by their momentum, even with a zero gradient.

    1. The rows that have moved are those with nonzero moments, found once, and those with a gradient since.
    2. For the optimizer's step, these rows replace the whole parameter, its gradient and its moments. After it, each
       row is copied back.
    Everything is stepped if more than half of the rows have moved, and with an optimizer other than AdamW. The same
    holds with an epsilon of 0 (which divides 0 by 0), and on GPUs, whose kernels round the decay differently.
    Cost: with m rows moved, four times m rows are read and three written back, in extra memory during the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, width: int):
        """parameter: (rows x width,), one of the optimizer's."""
        self._optimizer, self._parameter, self._width = optimizer, parameter, width
        self._group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        self._moved: torch.Tensor | None = None  # (rows,) bool; None: to be found from the moments

    def forget(self) -> None:
        """Forget which rows have moved, because the moments have changed without a step."""
        self._moved = None

    @contextlib.contextmanager
    def alone(self, rows: torch.Tensor | None) -> Iterator[None]:
        """A context in which the optimizer's step changes only the rows that have moved.

        rows: (rows,) bool, True where the gradient may be nonzero; None: not known.
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
                weights.mul_(1 - decay)  # decays the moved rows too, but their new values are written next
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
