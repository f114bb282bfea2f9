"""A model's weights in fragments of nearly equal size, each averaged by itself."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from cos598d.comm.calls import Pending
from cos598d.comm.communicator import Communicator
from cos598d.sync.buckets import Bucket, Named, Sized, T
from cos598d.sync.codecs import Codec


class RowRange(NamedTuple):
    """Rows [first, end) of the tensor at index `place`."""

    place: int
    first: int
    end: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.end - self.first


def by_dtype(tensors: Sequence[T]) -> list[list[T]]:
    """The tensors of each dtype, in order."""
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in {t.dtype: None for t in tensors}]


def rows_of(shape: Sequence[int]) -> int:
    """The number of rows of a tensor with that shape; a single number is one row."""
    return shape[0] if shape else 1


def cut_in_rows(tensors: Sequence[Sized], rows: Sequence[int], count: int) -> list[list[RowRange]]:
    """All rows of the tensors, in order, in at most `count` fragments whose sizes differ by about a row.

    rows: the number of each tensor's rows; a tensor without elements is in no fragment.
    """
    total = sum(tensor.numel() for tensor in tensors)
    fragments: list[list[RowRange]] = [[] for _ in range(count)]
    begin = 0  # of the tensor, in elements
    for place, (tensor, height) in enumerate(zip(tensors, rows, strict=True)):
        first, width = 0, tensor.numel() // max(1, height)
        while width and first < height:
            fragment = (begin + first * width) * count // total
            limit = -(-(fragment + 1) * total // count)  # where the next fragment begins
            end = min(height, max(first + 1, -(-(limit - begin) // width)))
            fragments[fragment].append(RowRange(place, first, end))
            first = end
        begin += tensor.numel()
    return [fragment for fragment in fragments if fragment]


class Fragment:
    """Rows of some parameters of one dtype, their last agreed weights, and their average while it is being sent.

    agreed     the weights that all ranks agree on as the model: the same on each
    momentum   the momentum of the steps that change them
    """

    def __init__(self, name: str, parameters: Sequence[Named], cuts: Sequence[RowRange], codec: Codec):
        weights = [(f"{parameters[cut.place][0]}[{cut.first}:{cut.end}]", _rows(parameters, cut)) for cut in cuts]
        self._weights = [weight for _, weight in weights]
        self._bucket, self.codec = Bucket(name, weights), codec
        self.agreed, self.momentum = self._side_by_side(), torch.zeros_like(self._bucket.buffer)
        self._before: torch.Tensor | None = None  # this rank's weights when their average was started
        self._pending: Pending | None = None

    def start(self, comm: Communicator) -> None:
        """Start to average the difference between the agreed weights and this rank's."""
        self._before = self._side_by_side()
        torch.sub(self.agreed, self._before, out=self._bucket.buffer).div_(comm.world_size)
        self._pending = self.codec.start(self._bucket)

    def arrive(self) -> None:
        """Block until the average has arrived, if one was started."""
        if self._pending is not None:
            self.codec.finish(self._bucket, self._pending)
            self._pending = None

    def step(self, learning_rate: float, momentum: float) -> None:
        """Wait for the average, if one was started. The agreed weights make Nesterov's step along it. This rank's
        weights change by the difference between the new agreed weights and its weights when the average was started. So
        the rank keeps what it has learned since."""
        if self._before is None:
            return
        self.arrive()
        mean = self._bucket.buffer
        self.momentum.mul_(momentum).add_(mean)
        self.agreed.sub_(mean.add_(self.momentum, alpha=momentum), alpha=learning_rate)
        torch.sub(self.agreed, self._before, out=mean)
        for weight, part in zip(self._weights, self._bucket.views, strict=True):
            weight.add_(part)
        self._before = None

    def drop(self) -> None:
        """Drop the average that is being sent, because it is outdated."""
        if self._before is not None:
            self.arrive()
            self.codec.forget_step()
            self._before = None

    def agree(self) -> None:
        """Make the current weights, equal on all ranks, the agreed ones."""
        self.agreed.copy_(self._side_by_side())

    def state(self) -> dict[str, torch.Tensor]:
        """The complete state by name, with the average, which has arrived then."""
        self.arrive()
        under_way = {} if self._before is None else {"average": self._bucket.buffer, "before": self._before}
        codec = {f"codec/{name}": tensor for name, tensor in self.codec.own_state().items()}
        return {"agreed": self.agreed, "momentum": self.momentum} | under_way | codec

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from what `state` gave."""
        self.agreed.copy_(tensors["agreed"])
        self.momentum.copy_(tensors["momentum"])
        if "before" in tensors:
            self._before = torch.empty_like(self.agreed).copy_(tensors["before"])
            self._bucket.buffer.copy_(tensors["average"])
        codec = {name.removeprefix("codec/"): each for name, each in tensors.items() if name.startswith("codec/")}
        self.codec.load_own_state(codec)

    def _side_by_side(self) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in self._weights])


def _rows(parameters: Sequence[Named], cut: RowRange) -> nn.Parameter:
    """A view of these rows in the parameter's memory."""
    weights = parameters[cut.place][1].data
    return nn.Parameter(weights[cut.first : cut.end] if weights.dim() else weights.view(1), requires_grad=False)
