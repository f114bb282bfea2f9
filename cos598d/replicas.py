"""Do all replicas hold the same model? They compare digests, so equal replicas send only a line of text."""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from cos598d.comm.group import Ranks
from cos598d.errors import UserError
from cos598d.records.conventions import STATE

# Relative to a tensor's largest value. Processors with different vector instructions round a step differently.
LAST_BITS = 1e-6


@torch.no_grad()
def check_replicas(ranks: Ranks, tensors: Iterable[tuple[str, torch.Tensor]], iteration: int) -> None:
    """Compare named tensors, such as a model's weights, across ranks. Every rank calls it with the same names.

    Raises UserError, the same on every rank, with the rank and the tensor, if they differ by more than the last bits.
    """
    named = dict(tensors) if ranks.world_size > 1 else {}
    every = ranks.exchange({name: digest(tensor) for name, tensor in named.items()})
    differing = [name for name in named if any(found[name] != every[0][name] for found in every)]
    for name in differing:
        first = named[name].detach().clone()
        with ranks.ledger.naming(name, STATE):
            dist.broadcast(first, 0)
        distance = (named[name].double() - first.double()).abs().max() / first.double().abs().max().clamp(min=1e-300)
        for rank, found in enumerate(ranks.exchange(float(distance) if distance.isfinite() else None)):
            if found is None or found > LAST_BITS:
                by = "a value that is not finite" if found is None else f"up to {found:.1e} of its largest value"
                raise UserError(
                    f"weights differ between ranks after iteration {iteration}: rank {rank}'s {name} differs from rank "
                    f"0's by {by}. Check the sync, or find the first step with --check_replicas 1."
                )


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], iteration: int, learning_rate: float) -> None:
    """Raise UserError if one of these, such as the loss or a weight, has a value that is not a finite number."""
    for name, tensor in tensors:
        if not torch.isfinite(tensor.detach()).all():
            raise UserError(
                f"{name} has a value that is not a finite number after iteration {iteration}. Lower --learning_rate "
                f"{learning_rate:g}, or check the weights."
            )


def digest(tensor: torch.Tensor) -> str:
    """A short digest of a tensor's bits."""
    # A copy: memory that numpy has seen cannot be freed any more, as zero3 does with weights.
    bits = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    return hashlib.sha256(bits.numpy().data).hexdigest()[:16]
