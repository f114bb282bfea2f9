"""Local training, and an outer step along the average of what the ranks have learned."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from cos598d.sync.local_sgd import LocalSGD


class DiLoCo(LocalSGD):
    """Local steps, and an outer step along their averaged movement (Douillard et al. 2023, "DiLoCo").

    The ranks hold a second copy of the weights, the agreed ones, which is the same on all, and a momentum.
    1. In every step each rank steps by the gradient of its own share of the global batch, as in `local_sgd`.
    2. After every H-th step (`--sync_every H`), and before the model is evaluated or saved, an all-reduce averages the
       weights, as in `local_sgd`.
    3. The difference between the agreed weights and that average is the outer gradient. The agreed weights make a step
       of SGD along it, with Nesterov's momentum (`--outer_learning_rate`, `--outer_momentum`), the same on all ranks.
    4. Every rank continues from the agreed weights. It keeps its own optimizer's state.

    With an outer learning rate of 1 and no momentum this is `local_sgd`.

    Cost for weights of S bytes: as `local_sgd`, 1 call every H steps; every rank sends and receives 2(n-1)/n S / H per
    step on average. In memory 2 S more, and S of outer gradients while it averages. Choose it if links are so slow that
    H must be large: the momentum makes up for some of what fewer averages lose.
    """

    takes = (*LocalSGD.takes, "outer_learning_rate", "outer_momentum")

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        self._agreed, self._begins = [p.detach().clone() for _, p in self.parameters], True
        rate, momentum = self.options.outer_learning_rate, self.options.outer_momentum
        self._outer = torch.optim.SGD(self._agreed, rate, momentum, nesterov=momentum > 0)
        return call

    @torch.no_grad()
    def begin_forward(self) -> None:
        super().begin_forward()
        if self._begins:  # all ranks have the same weights: wrapped, averaged or loaded
            weights: list[torch.Tensor] = [p for _, p in self.parameters]
            torch._foreach_copy_(self._agreed, weights)
            self._begins = False

    @torch.no_grad()
    def average_weights(self) -> None:
        super().average_weights()
        weights: list[torch.Tensor] = [p for _, p in self.parameters]
        for agreed, average in zip(self._agreed, weights, strict=True):
            agreed.grad = agreed - average
        self._outer.step()
        self._outer.zero_grad()
        torch._foreach_copy_(weights, self._agreed)

    def settle(self) -> None:
        super().settle()
        self._begins = True

    def own_state(self) -> dict[str, torch.Tensor]:
        """As for `local_sgd`, and the momentum. Settled, the agreed weights are the model's."""
        states = (self._outer.state[agreed] for agreed in self._agreed)
        momenta = {f"outer/{k}": state["momentum_buffer"] for k, state in enumerate(states) if state}
        return super().own_state() | momenta

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_own_state(state)
        for k, agreed in enumerate(self._agreed):
            if f"outer/{k}" in state:
                self._outer.state[agreed]["momentum_buffer"] = state[f"outer/{k}"].clone()
