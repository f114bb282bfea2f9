"""A file that averages gradients one by one, as a gradient sync."""

from types import ModuleType

import torch

from cos598d.sync.base import GradientSync
from cos598d.tools.check.claims.base import MakeSync


def tensorwise(student: ModuleType) -> MakeSync:
    """A sync that calls the student's `average(comm, gradient, name)` for each gradient."""

    class Tensorwise(GradientSync):
        def average(self, name: str, gradient: torch.Tensor) -> None:
            student.average(self.comm, gradient, name)

    return Tensorwise
