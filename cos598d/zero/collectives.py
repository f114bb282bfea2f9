"""The two collectives that ZeRO is made of, on a flat tensor of n equal parts: reduce-scatter and all-gather."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cos598d.records.conventions import GRADIENTS, PARAMETERS
from cos598d.sync.base import GradientSync
from cos598d.zero.unit import Unit


def start_reduce_scatter(sync: GradientSync, unit: Unit) -> Any:
    """Start to send part k of the unit's gradients to rank k. When the call is done, `unit.arriving` has the n part r.

    An all-to-all: every rank sends and receives (n-1)/n S. gloo's own reduce-scatter would send twice as much.
    """
    if unit.arriving is None:
        unit.arriving = unit.empty().view(unit.ranks, -1)
    with sync.ledger.naming(unit.name, GRADIENTS):
        return dist.all_to_all_single(unit.arriving.view(-1), unit.gradients, group=sync.group, async_op=True)


def average_of(parts: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The average of the ranks' gradients, (n, length), summed in order of rank; put into `out` if it is given.

    16-bit numbers are summed in 32 bits, so that their sum does not overflow where their average would not.
    """
    if parts.element_size() > 2:
        return torch.mean(parts, dim=0, out=out)
    average = parts.mean(dim=0, dtype=torch.float32)
    return average.to(parts.dtype) if out is None else out.copy_(average)


def start_all_gather(
    sync: GradientSync, unit: Unit, flat: torch.Tensor, name: str, purpose: str = PARAMETERS
) -> Callable[[], None]:
    """Start to gather `flat`, of the unit's layout, of which rank r has part r. Call the result to wait for it.

    On CPUs every rank sends its part to every other, straight into its place: (n-1)/n S, and no copy. (gloo's own
    all-gather lands in new memory, is copied from there, and takes twice the processor's time.) Units may then be
    started in another order on every rank. On other devices it is the backend's collective, in one order on all ranks.
    """
    own = unit.part_of(flat)
    if unit.ranks == 1:
        return lambda: None
    if flat.device.type != "cpu":
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13's new name
        with sync.ledger.naming(name, purpose):
            under_way: Any = gather(flat, own.clone(), group=sync.group, async_op=True)
        return under_way.wait
    with sync.ledger.composing("all_gather", own, name, purpose, ends_later=True) as end:
        calls: list[Any] = []
        for rank, part in enumerate(flat.view(unit.ranks, -1)):
            if rank != unit.rank:
                calls.append(dist.irecv(part, sync.peer(rank), sync.group, unit.number))
                calls.append(dist.isend(own, sync.peer(rank), sync.group, unit.number))

    def wait() -> None:
        for call in calls:
            call.wait()
        end()

    return wait
