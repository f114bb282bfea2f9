"""A model's weights in fragments of about one size, each of which is averaged by itself."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from cos598d.comm.calls import Pending
from cos598d.comm.communicator import Communicator
from cos598d.sync.buckets import Bucket, Named, Sized, T
from cos598d.sync.codecs import Codec


class RowRange(NamedTuple):
    """Some rows of the tensor at `place`, from `first` to before `end`."""

    place: int
    first: int
    end: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.end - self.first


def by_dtype(tensors: Sequence[T]) -> list[list[T]]:
    """The tensors of each dtype, in order."""
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in {t.dtype: None for t in tensors}]


def rows_of(shape: Sequence[int]) -> int:
    """How many rows a tensor of that shape has; a single number is one."""
    return shape[0] if shape else 1


def cut_in_rows(tensors: Sequence[Sized], rows: Sequence[int], count: int) -> list[list[RowRange]]:
    """All rows of the tensors, in order, in at most `count` fragments that differ by about a row of elements.

    rows: how many each tensor has; one without elements is in no fragment.
    """
    total = sum(tensor.numel() for tensor in tensors)
    fragments: list[list[RowRange]] = [[] for _ in range(count)]
    begin = 0  # of the tensor, in elements
    for place, (tensor, height) in enumerate(zip(tensors, rows, strict=True)):
        first, width = 0, tensor.numel() // max(1, height)
        while width and first < height:
            fragment = (begin + first * width) * count // total
            limit = -(-(fragment + 1) * total // count)  # where the next one begins
            end = min(height, max(first + 1, -(-(limit - begin) // width)))
            fragments[fragment].append(RowRange(place, first, end))
            first = end
        begin += tensor.numel()
    return [fragment for fragment in fragments if fragment]


class Fragment:
    """Rows of some parameters of one dtype, what the ranks agreed on of them last, and their average when it is sent.

    agreed     what all ranks hold to be the model: the same on each
    momentum   of the steps by which it moves
    """

    def __init__(self, name: str, parameters: Sequence[Named], cuts: Sequence[RowRange], codec: Codec):
        weights = [(f"{parameters[cut.place][0]}[{cut.first}:{cut.end}]", _rows(parameters, cut)) for cut in cuts]
        self._weights = [weight for _, weight in weights]
        self._bucket, self.codec = Bucket(name, weights), codec
        self.agreed, self.momentum = self._side_by_side(), torch.zeros_like(self._bucket.buffer)
        self._before: torch.Tensor | None = None  # the weights when their average set out
        self._pending: Pending | None = None

    def start(self, comm: Communicator) -> None:
        """Let the average of how far the ranks have moved since they agreed set out."""
        self._before = self._side_by_side()
        torch.sub(self.agreed, self._before, out=self._bucket.buffer).div_(comm.world_size)
        self._pending = self.codec.start(self._bucket)

    def arrive(self) -> None:
        """Block until the average is there, if it is under way."""
        if self._pending is not None:
            self.codec.finish(self._bucket, self._pending)
            self._pending = None

    def step(self, learning_rate: float, momentum: float) -> None:
        """Where an average is under way, wait for it. What the ranks agree on moves by Nesterov's step along it, and
        the weights as far as that is from where they were when it set out: what they have learnt since is kept."""
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
        """Forget the average that is under way: it has been overtaken."""
        if self._before is not None:
            self.arrive()
            self.codec.forget_step()
            self._before = None

    def agree(self) -> None:
        """The weights are now the same on all ranks."""
        self.agreed.copy_(self._side_by_side())

    def state(self) -> dict[str, torch.Tensor]:
        """All of it by name, with the average that has arrived."""
        self.arrive()
        under_way = {} if self._before is None else {"average": self._bucket.buffer, "before": self._before}
        codec = {f"codec/{name}": tensor for name, tensor in self.codec.own_state().items()}
        return {"agreed": self.agreed, "momentum": self.momentum} | under_way | codec

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` gave."""
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
    """The rows in the parameter's own memory."""
    weights = parameters[cut.place][1].data
    return nn.Parameter(weights[cut.first : cut.end] if weights.dim() else weights.view(1), requires_grad=False)
