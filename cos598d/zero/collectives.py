"""An all-gather of a flat tensor of n equal parts, on CPUs without a copy."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cos598d.records.conventions import PARAMETERS
from cos598d.sync.base import GradientSync
from cos598d.zero.unit import Unit


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
