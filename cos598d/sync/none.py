"""No synchronization: a single process, and the compute-only baseline for exposed communication."""

from collections.abc import Callable

from torch import nn

from cos598d.sync.base import GradientSync


class NoSync(GradientSync):
    """Every rank keeps its own gradients.

    1. Before training every rank receives rank 0's state, as in every sync.
    2. After that nothing is sent. With several ranks the replicas drift apart: in their weights, in their buffers and,
       under fp16, in their loss scales and learning rates too. A run that resumes continues from rank 0's on all.

    Cost: 0 calls, 0 bytes. Choose it for one process (task 1). On n ranks use it only to measure: subtract an
    iteration's time with this sync from that with another, and you get its exposed communication.
    """

    def attach(self, model: nn.Module) -> Callable:
        self.replicas_equal = self.ranks == 1
        return super().attach(model)

    def begin_forward(self) -> None:
        """Nothing to do: each rank has buffers of its own."""

    def settle(self) -> None:
        """Nothing to do: the replicas stay different."""

    def finish(self) -> None:
        """Nothing to do: the local gradients are the result."""
