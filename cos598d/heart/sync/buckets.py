"""Gradients packed in one buffer, so that many tensors are sent in one call."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from cos598d.heart.sync.base import Named

MIB = 1 << 20


class Bucket:
    """A buffer for the gradients of some parameters of one dtype. After a step, each .grad is a view of its part."""

    def __init__(self, name: str, parameters: Sequence[Named]):
        self.name, self.parameters = name, list(parameters)
        sizes = [p.numel() for _, p in parameters]
        self.buffer = parameters[0][1].new_zeros(sum(sizes))
        parts = zip(self.buffer.split(sizes), parameters, strict=True)
        self.views = {p: part.view_as(p) for part, (_, p) in parts}

    def take(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient into the buffer, or zeros if it has none."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)

    def hand_out(self, is_used: Mapping[nn.Parameter, bool], ranks: int) -> None:
        """The buffer has the sum: make each .grad its average, or None for a parameter that no rank used."""
        self.buffer /= ranks
        for parameter, view in self.views.items():
            parameter.grad = view if is_used[parameter] else None


def plan_buckets(parameters: Sequence[Named], bucket_mb: float, first_bucket_mb: float) -> list[list[Named]]:
    """Group the parameters in reverse order, as their gradients arrive, by dtype and into at most `bucket_mb` MiB each;
    the first group of each dtype, which is sent first, into `first_bucket_mb`."""
    open_groups: dict[torch.dtype, list[Named]] = {}
    done, room = [], {}
    for name, parameter in reversed(parameters):
        dtype, size = parameter.dtype, parameter.numel() * parameter.element_size()
        if dtype in open_groups and size > room[dtype]:
            done.append(open_groups.pop(dtype))
        if dtype not in open_groups:
            open_groups[dtype] = []
            room[dtype] = (bucket_mb if dtype in room else first_bucket_mb) * MIB
        open_groups[dtype].append((name, parameter))
        room[dtype] -= size
    return done + list(open_groups.values())
