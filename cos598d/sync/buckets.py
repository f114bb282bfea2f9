"""Gradients packed in one buffer, so that many tensors are sent in one call."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.estimate import Tensor
from cos598d.sync.options import SyncOptions

MIB = 1 << 20
Named = tuple[str, nn.Parameter]


class Sized(Protocol):
    """The methods of a tensor that the planning of buckets uses."""

    @property
    def dtype(self) -> Any: ...

    def numel(self) -> int: ...

    def element_size(self) -> int: ...


T = TypeVar("T", bound=Sized)


class Bucket:
    """A buffer for the gradients of some parameters of one dtype. Each parameter has a view of its part.

    Filling it copies the gradients and scales them. The averages are handed out as views, so nothing is copied back:
    the parameters' gradients stay in the buffer until the optimizer's zero_grad. So the next step overwrites a gradient
    that you have kept. With `copies`, the averages are copied back into the gradients that autograd made.
    """

    copies = False

    def __init__(
        self, name: str, parameters: Sequence[Named], buffer: torch.Tensor | None = None, copies: bool = False
    ):
        """`buffer`, (elements of all parameters,), is allocated here unless it is given."""
        self.name, self.parameters, self.copies = name, list(parameters), copies
        first = self.parameters[0][1]
        sizes = [p.numel() for _, p in self.parameters]
        self.buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device) if buffer is None else buffer
        self.views = [part.view_as(p) for part, (_, p) in zip(self.buffer.split(sizes), self.parameters, strict=True)]

    def fill(self, place: int, scale: float) -> None:
        """Copy `scale` times the parameter's gradient to its place, or zeros if it has none."""
        gradient = self.parameters[place][1].grad
        if gradient is None:
            self.views[place].zero_()
        elif gradient.is_sparse:
            raise UserError(
                f"{self.parameters[place][0]} has a sparse gradient, which cannot be in a bucket. Choose --sync "
                "all_reduce "
                "or overlap, or compute it without sparse=True."
            )
        else:
            torch.mul(gradient, scale, out=self.views[place])

    def take(self, place: int, scale: float) -> None:
        """As `fill`, but without `copies` .grad becomes the bucket's copy, so that backward's own can be freed."""
        self.fill(place, scale)
        if not self.copies:
            self.parameters[place][1].grad = self.views[place]

    def hand_out(self, is_used: Sequence[bool]) -> None:
        """Set the parameters' gradients to the buffer's values; None for a parameter that no rank used."""
        for (_, parameter), view, used in zip(self.parameters, self.views, is_used, strict=True):
            if not used:
                parameter.grad = None
            elif not self.copies:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(view)
            else:
                parameter.grad.copy_(view)


class RowBucket(Bucket):
    """Some rows of one parameter's gradient, packed as they are sent in one step. Which rows these are differs by step,
    but not by rank."""

    def __init__(self, name: str, parameter: nn.Parameter, rows: torch.Tensor, values: torch.Tensor):
        """`rows`, (number,), are the indices of `values`, (number, ...), which are contiguous and become the buffer."""
        self.name, self.parameters, self.rows = name, [(name, parameter)], rows
        self.buffer, self.views = values.view(-1), [values]


def plan_buckets(
    parameters: Sequence[tuple[str, T]],
    bucket_mb: float,
    first_bucket_mb: float,
    layer_of: Callable[[T], Hashable] = lambda _: None,
) -> list[list[tuple[str, T]]]:
    """Group the parameters in reverse order, as their gradients arrive, by dtype and into at most `bucket_mb` each.

    The first group of each dtype holds at most `first_bucket_mb`. A tensor larger than a group's limit gets a group to
    itself. Sizes are in MiB. Groups are in the order in which their last gradient is expected. If `layer_of` tells
    layers apart, a group of at least `first_bucket_mb` ends with its layer.
    """
    open_groups: dict[Hashable, list[tuple[str, T]]] = {}
    done: list[list[tuple[str, T]]] = []
    room: dict[Hashable, float] = {}  # bytes left in the open group
    held: dict[Hashable, int] = {}  # bytes in the open group
    for name, parameter in reversed(parameters):
        dtype, size = parameter.dtype, parameter.numel() * parameter.element_size()
        if dtype in open_groups:
            is_over = layer_of(open_groups[dtype][-1][1]) != layer_of(parameter)
            if size > room[dtype] or (is_over and held[dtype] >= first_bucket_mb * MIB):
                done.append(open_groups.pop(dtype))
        if dtype not in open_groups:
            open_groups[dtype], held[dtype] = [], 0
            room[dtype] = (bucket_mb if dtype in room else first_bucket_mb) * MIB
        open_groups[dtype].append((name, parameter))
        room[dtype] -= size
        held[dtype] += size
    return done + list(open_groups.values())


def in_buckets(tensors: Sequence[Tensor], options: SyncOptions | None = None) -> list[list[Tensor]]:
    """The tensors grouped as by `plan_buckets`, for a sync that predicts its calls.

    Without `options`, all tensors of a dtype are in one bucket.
    """
    sizes = (options.bucket_mb, options.first_bucket_mb) if options else (math.inf, math.inf)
    groups = plan_buckets([(tensor.name, tensor) for tensor in tensors], *sizes)
    return [[tensor for _, tensor in group] for group in groups]
