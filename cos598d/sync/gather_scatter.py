"""Task 2(a): rank 0 gathers each gradient, averages it and scatters the average."""

from dataclasses import dataclass

import torch

from cos598d.sync.base import GradientSync
from cos598d.sync.cost import Collective, CollectiveCall, Step
from cos598d.sync.estimate import Load


@dataclass(frozen=True)
class WithRoot(Collective):
    """From all ranks to rank 0 at once, or from rank 0 to all: n-1 payloads through its link."""

    op: str

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        moved = (ranks - 1) * payload * factor
        return Load(1, moved, 2 * moved / ranks, moved)


GATHER, SCATTER = WithRoot("gather"), WithRoot("scatter")


class GatherScatter(GradientSync):
    """Averaging through one rank, tensor by tensor, after backward.

    For each gradient, in the order of the model's parameters:
    1. Every rank sends its gradient to rank 0 (gather).
    2. Rank 0 averages the n gradients.
    3. Rank 0 sends the average to every rank (scatter), which replaces its own gradient.

    Cost for P gradients of S bytes in all: 2P calls. Rank 0 receives and sends (n-1) S; every other rank sends and
    receives S. Rank 0's link carries (n-1) times the others' traffic, and all ranks wait for it. Rank 0 holds n copies
    of the largest gradient. Choose it to see why all-reduce was invented.
    """

    keeps_nothing = True

    def average(self, name: str, gradient: torch.Tensor) -> None:
        copies = self.comm.gather(gradient, name)
        parts = None
        if copies is not None:
            mean = copies[0]
            for copy in copies[1:]:
                mean += copy
            mean /= self.comm.world_size
            parts = [mean] * self.comm.world_size
        self.comm.scatter(gradient, parts, name)

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        return [CollectiveCall(collective, [tensor]) for tensor in step.tensors for collective in (GATHER, SCATTER)]
