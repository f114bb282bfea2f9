"""Local training whose averages are sent in fragments while training continues: streaming DiLoCo."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors

from cos598d.sync.base import Options
from cos598d.sync.local_sgd import LocalSGD, LocalSGDOptions, side_by_side
from cos598d.sync.options import SYNC_GROUP
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class DiLoCoOptions(LocalSGDOptions):
    """The options of diloco.

    fragments: the number of parts that weights are averaged in, one after the other.
    outer_learning_rate, outer_momentum: of the outer optimizer.
    """

    fragments: int = flag(
        16, "parts of the weights that diloco averages one after the other", group=SYNC_GROUP, least=1, below=10_000
    )
    outer_learning_rate: float = flag(0.7, "outer optimizer's learning rate, for diloco", group=SYNC_GROUP, above=0)
    outer_momentum: float = flag(
        0.9, "outer optimizer's Nesterov momentum, for diloco", group=SYNC_GROUP, least=0, below=1
    )


class DiLoCo(LocalSGD):
    """Local steps, and an outer step along their averaged movement, fragment by fragment (Douillard et al. 2023,
    "DiLoCo", and 2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512).

    The weights are split into F fragments of whole tensors, as equal as these allow (`--fragments F`). The ranks hold a
    second copy of the weights, the agreed ones, which is the same on all, and a momentum.
    1. In every step each rank steps by the gradient of its own share of the global batch, as in `local_sgd`.
    2. After every H-th step (`--sync_every H`) the next fragment is sent: each rank takes the difference between its
       weights and the agreed ones, and an all-reduce averages that while training continues.
    3. H steps later, before the next fragment is sent, it has arrived. The agreed weights make a step of SGD along the
       average, with Nesterov's momentum (`--outer_learning_rate`, `--outer_momentum`). Each rank adds to its own
       weights the difference between the new agreed weights and its own weights of point 2. So it keeps what it has
       learned since.
    4. Before the model is evaluated or saved, all ranks average their weights, as in `local_sgd`, and that becomes the
       agreed copy. A fragment that is being sent is dropped, because the average replaces it.

    The paper mixes the arriving weights with a rank's own, half and half; point 3 adds instead. With H = 1, F = 1, an
    outer learning rate of 1 and no momentum, every rank holds the previous step's average plus its own last step.

    Cost for weights of S bytes: 1 call every H steps. Every rank sends and receives 2(n-1)/n S / (F H) per step on
    average, and waits for none of it if it takes less than H steps. In memory 2 S, and one fragment twice. Choose it if
    a step takes far less time than sending its gradients.
    """

    options_kind: type[Options] = DiLoCoOptions

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        groups: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        total, begin = sum(p.numel() for _, p in self.parameters), 0
        for _, p in self.parameters:
            groups.setdefault((begin * self.options.fragments // total, p.dtype), []).append(p)
            begin += p.numel()
        self._fragments = [
            Fragment(turn, weights, torch.zeros_like(side_by_side(weights))) for (turn, _), weights in groups.items()
        ]
        return call

    def begin_forward(self) -> None:
        super().begin_forward()
        for fragment in self._fragments:
            if fragment.agreed is None:  # the ranks' weights are equal: wrapped, averaged or loaded
                fragment.agreed = side_by_side(fragment.weights)

    @torch.no_grad()
    def share_weights(self) -> None:
        for fragment in self._fragments:
            if fragment.wait():
                self._step(fragment)
        turn = self.steps // self.options.sync_every % self.options.fragments
        for fragment in self._fragments:
            if fragment.turn == turn:
                self._start(fragment)

    def _start(self, fragment: "Fragment") -> None:
        """Start to average the difference between the agreed weights and this rank's."""
        fragment.before = side_by_side(fragment.weights)
        fragment.moved = (fragment.agreed - fragment.before).div_(self.ranks)
        with self.ledger.naming(f"fragment {fragment.turn} of {fragment.moved.dtype}"):
            fragment.call = dist.all_reduce(fragment.moved, group=self.group, async_op=True)

    def _step(self, fragment: "Fragment") -> None:
        """The average has arrived: the agreed weights make Nesterov's step along it. This rank's weights change by the
        difference between the new agreed weights and its weights when the average was started."""
        rate, momentum, mean = self.options.outer_learning_rate, self.options.outer_momentum, fragment.moved
        fragment.momentum.mul_(momentum).add_(mean)
        fragment.agreed.sub_(mean.add_(fragment.momentum, alpha=momentum), alpha=rate)
        changes = _unflatten_dense_tensors(fragment.agreed - fragment.before, fragment.weights)
        torch._foreach_add_(fragment.weights, changes)

    def average_weights(self) -> None:
        for fragment in self._fragments:
            fragment.wait()  # and drop what has arrived: the average replaces it
            fragment.agreed = None
        super().average_weights()

    def own_state(self) -> dict[str, torch.Tensor]:
        """As for `local_sgd`, and each fragment's momentum. Settled, the agreed weights are the model's."""
        momenta = {f"outer/{place}": fragment.momentum for place, fragment in enumerate(self._fragments)}
        return super().own_state() | momenta

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_own_state(state)
        for place, fragment in enumerate(self._fragments):
            fragment.momentum.copy_(state[f"outer/{place}"])

    def detach(self) -> None:
        for fragment in self._fragments:
            fragment.wait()
        self._fragments = []
        super().detach()


@dataclass
class Fragment:
    """Some parameters of one dtype, that are averaged when it is their turn.

    agreed: the weights that all ranks agree on, the same on each; None where they are the model's. momentum: that of
    their steps. moved, before: while an average is under way, what is averaged, and this rank's weights at its start.
    """

    turn: int
    weights: list[torch.Tensor]
    momentum: torch.Tensor
    agreed: Any = None
    moved: Any = None
    before: Any = None
    call: Any = None

    def wait(self) -> bool:
        """Wait for the average, if one is under way. Return whether one was."""
        call, self.call = self.call, None
        return call is not None and call.wait()
