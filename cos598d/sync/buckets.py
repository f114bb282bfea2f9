"""Gradients packed in one buffer, so that many tensors are sent in one call."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from cos598d.sync.base import Named

MIB = 1 << 20


class Bucket:
    """A buffer for the gradients of some parameters of one dtype. Each parameter has a view of its part. What is sent
    is `numbers`, (count,), which are real.

    Filling it divides by the number of ranks. So the sum over the ranks is the average, and fits into 16 bits where the
    average does. The averages are copied back into the gradients that autograd made. With `is_view`, each .grad becomes
    the view itself. `missing` are the parameters that are to come in this step.
    """

    def __init__(self, name: str, named: Sequence[Named], ranks: int, is_view: bool, flat: torch.Tensor | None = None):
        """`flat`: the buffer, (elements of all parameters,), which is made here unless it is given."""
        self.name, self.share, self.is_view = name, 1 / ranks, is_view
        sizes = [p.numel() for _, p in named]
        self.buffer = named[0][1].new_zeros(sum(sizes)) if flat is None else flat
        parts = zip(self.buffer.split(sizes), named, strict=True)
        self.views = {p: shaped_like(part, p) for part, (_, p) in parts}
        self.missing = set(self.views)
        self.numbers = as_real(self.buffer)
        self.shapes = [torch.view_as_real(p).shape if p.is_complex() else p.shape for _, p in named]

    def take(self, parameter: nn.Parameter) -> None:
        """Put the parameter's gradient, divided by the ranks, into the buffer; zeros if it has none."""
        self.missing.discard(parameter)
        view, gradient = self.views[parameter], parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient is view:  # another backward has been added to the last average
            view.mul_(self.share)
        else:
            torch.mul(gradient.to_dense(), self.share, out=view)
            if self.is_view:
                parameter.grad = view

    def hand_out(self, is_used: Mapping[nn.Parameter, bool]) -> None:
        """The buffer has the average: give it to the parameters. One that no rank used gets None."""
        self.missing = set(self.views)
        for parameter, view in self.views.items():
            if not is_used[parameter]:
                parameter.grad = None
            elif self.is_view:
                parameter.grad = view
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.empty_like(parameter).copy_(view)
            else:
                parameter.grad.copy_(view)


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor as real numbers, which every collective can send."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def shaped_like(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A flat part of a buffer as a tensor with the shape of `like`, and with its strides if it fills its memory."""
    strides = torch.empty_like(like, device="meta").stride()  # those of a dense tensor that torch would make
    return part.as_strided(like.shape, strides, part.storage_offset())


def plan_buckets(parameters: Sequence[Named], bucket_mb: float, first_bucket_mb: float) -> list[list[Named]]:
    """Group the parameters in reverse order, as their gradients arrive, by dtype and into at most `bucket_mb` MiB each.

    The first group of each dtype, which is sent first, holds at most `first_bucket_mb`. A tensor larger than a group's
    limit gets a group to itself. Groups are in the order in which their last gradient is expected.
    """
    open_groups: dict[torch.dtype, list[Named]] = {}
    done: list[list[Named]] = []
    room: dict[torch.dtype, float] = {}  # bytes left in the open group
    for name, parameter in reversed(parameters):
        dtype, size = parameter.dtype, parameter.numel() * parameter.element_size()
        if dtype in open_groups and size > room[dtype]:
            done.append(open_groups.pop(dtype))
        if dtype not in open_groups:
            open_groups[dtype] = []
            room[dtype] = (bucket_mb if dtype in room else min(first_bucket_mb, bucket_mb)) * MIB
        open_groups[dtype].append((name, parameter))
        room[dtype] -= size
    return done + list(open_groups.values())
