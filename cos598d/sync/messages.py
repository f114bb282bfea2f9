"""What a collective needs that is made of messages between ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from cos598d.sync.base import GradientSync


def swap(sync: GradientSync, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Send a tensor to the rank `to` while another arrives from the rank `source`. Block until both are done."""
    sending = dist.P2POp(dist.isend, outgoing, sync.peer(to), sync.group)
    receiving = dist.P2POp(dist.irecv, incoming, sync.peer(source), sync.group)
    for work in dist.batch_isend_irecv([receiving, sending]):
        work.wait()


@contextmanager
def in_reach(sync: GradientSync, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or a copy in the host's memory, whose changes are copied back.

    gloo has no gather, scatter or messages for tensors on a device.
    """
    is_far = tensor.device.type != "cpu" and "gloo" in dist.get_backend(sync.group)
    there = tensor.cpu() if is_far else tensor
    yield there
    if there is not tensor:
        tensor.copy_(there)
