"""Do all replicas hold the same model? They compare digests, so equal replicas send only a line of text."""

import hashlib
import math
from collections.abc import Iterable

import torch

from cos598d.comm.communicator import Communicator
from cos598d.errors import UserError
from cos598d.records.conventions import STATE

# Relative to a tensor's largest value. CPUs with different vector instructions round an optimizer's step differently.
# The weights of ranks on such hosts differ in the last bits, though all step by the same averages.
LAST_BITS = 1e-6


def check_replicas(comm: Communicator, tensors: Iterable[tuple[str, torch.Tensor]], step: int) -> None:
    """Compare named tensors, such as a model's parameters, across ranks after iteration `step`.

    Every rank calls it with the same names. If ranks differ only in the last bits, they take rank 0's values. Raises
    UserError, the same on every rank, with the rank and the tensor, if they differ by more.
    """
    if comm.world_size == 1:
        return
    tensors = [(name, tensor.detach()) for name, tensor in tensors]
    digests = [digest(tensor) for _, tensor in tensors]
    if len(set(comm.exchange(hashlib.sha256("".join(digests).encode()).hexdigest()))) == 1:
        return
    every = comm.exchange(digests)
    differing = [named for named, *found in zip(tensors, *every, strict=True) if len(set(found)) > 1]
    distances = comm.exchange([_take_from_rank_0(comm, name, tensor) for name, tensor in differing])
    for rank, own in enumerate(distances[1:], start=1):
        far = [place for place, distance in enumerate(own) if distance is None or distance > LAST_BITS]
        if far:
            worst = own[far[0]]
            by = "a value that is not finite" if worst is None else f"up to {worst:.1e} of its largest value"
            more = f" (and {len(far) - 1} more)" if len(far) > 1 else ""
            raise UserError(
                f"weights differ between ranks after iteration {step}: rank {rank}'s {differing[far[0]][0]}{more} "
                f"differs from rank 0's by {by}. Check the sync, or find the first step with --check_replicas 1."
            )


def digest(tensor: torch.Tensor) -> str:
    """A short digest of a tensor's bits."""
    bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(bits.numpy().data).hexdigest()[:16]


def _take_from_rank_0(comm: Communicator, name: str, tensor: torch.Tensor) -> float | None:
    """Replace the tensor by rank 0's. Return the difference relative to its largest value; None if not finite."""
    theirs = tensor.clone()
    comm.broadcast(theirs, name, purpose=STATE)
    difference, largest = (t.abs().max().item() for t in (tensor.double() - theirs.double(), theirs.double()))
    tensor.copy_(theirs)
    if difference == 0:  # also 0 and -0
        return 0.0
    distance = difference / largest if largest else math.inf
    return distance if math.isfinite(distance) else None
