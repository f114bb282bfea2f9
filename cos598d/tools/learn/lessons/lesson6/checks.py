"""Lesson 6: the mean by calls that begin while backward runs, in one order on every rank."""

from types import ModuleType

from torch import nn

from cos598d.sync.base import GradientSync
from cos598d.tools.check.claims.base import MakeSync
from cos598d.tools.learn.checking import Check, Checks
from cos598d.tools.learn.lessons.common import averages, record
from cos598d.tools.learn.lessons.overlapped import begins_during_backward, golf_in_backward, one_order


def _by_hooks(student: ModuleType) -> MakeSync:
    """A sync that makes the student's `Averager(comm, parameters)` of a model's trainable parameters."""

    class ByHooks(GradientSync):
        def attach(self, model: nn.Module) -> nn.Module:
            module = super().attach(model)
            self.averager = student.Averager(self.comm, list(self.parameters))
            return module

        def finish(self) -> None:
            self.averager.finish()

    return ByHooks


_OWN = {
    "scaled": "rank {rank}'s gradient is the average times {factor:.4g}: divide once, by n, when the sum is there",
    "misplaced": "rank {rank} has the averages in the wrong gradients: ranks match calls only by their order, so begin "
    "them in one order on all ranks",
}
CHECKS = Checks(
    (Check(averages, (2,), _OWN), Check(one_order, (2, 3), _OWN), Check(begins_during_backward, (2,))),
    _by_hooks,
    record,
    golf=golf_in_backward(),
)
