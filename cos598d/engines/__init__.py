"""Other libraries' engines, one file each, behind the same door as our syncs.

An engine trains as one process does, and reports losses, seconds and bytes. It resumes from weights only.
"""

import contextlib
import copy
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from cos598d.errors import UsageError


def need(package: str, title: str, least: str, sync: str) -> None:
    """Raise UsageError unless `package` is installed, at version `least` or newer."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UsageError(f"--sync {sync} needs {title}, which is not installed. Run `make engines`.") from None
    if _numbers(found) < _numbers(least):
        raise UsageError(f"--sync {sync} needs {title} {least} or newer, and {found} is installed. Run `make engines`.")


class Apart:
    """A copy of a model for an engine that changes its model; the model itself stays plain, without memory.

    `whole` says whether the model has its weights. The buffers are the same tensors.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.copy: nn.Module = copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})
        self._sizes = [(p, p.untyped_storage().nbytes()) for p in model.parameters()]
        self.is_whole = True

    def begin_forward(self) -> None:
        """The copy is about to be trained, or evaluated, as the model would be: so its weights will be outdated."""
        if self.copy.training != self.model.training:
            self.copy.train(self.model.training)
        for p, _ in self._sizes if self.is_whole else ():
            p.untyped_storage().resize_(0)
        self.is_whole = False

    @torch.no_grad()
    def fill(self, name: str, whole: torch.Tensor) -> None:
        """Give the model's parameter of that name its memory back, with these values."""
        self.model.get_parameter(name).copy_(whole.detach())

    @contextlib.contextmanager
    def filling(self):
        """A context in which `fill` gets every parameter once."""
        for p, size in self._sizes:
            p.untyped_storage().resize_(size)
        yield
        self.is_whole = True


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" as (2, 13, 0)."""
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())
