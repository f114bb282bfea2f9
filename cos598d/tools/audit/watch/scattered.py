"""Reduce-scatters by hand: all gradients in a row, of whose sum each rank gets a part that it alone steps (ZeRO).

What the optimizer steps then is a tensor of the script's own. It can be judged all the same where the row is seen to be
the model's gradients one after another: its pieces, without the factor by which they were scaled before they travelled,
are this rank's gradients as they are cut.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cos598d.tools.audit.sketch import Sketcher

NAME = "all gradients in a row"
_EXACT = 1e-3  # of a gradient: what may differ
_SMALL = 1e-7  # of the largest: rounding


def pieces_of(
    tensors: Sequence[torch.Tensor],
    ranks: int,
    weights: Sequence[tuple[str, torch.Tensor]],
    local: Mapping[str, Sequence[np.ndarray | None]],
    sketch: Sketcher,
) -> np.ndarray | None:
    """Sketches (ranks, SIZE) of the local gradients as `tensors`, what a rank gives to a reduce-scatter, cut them.

    `weights` are the model's in order, `local` the sketches of their gradients by micro-batch. None where the tensors
    are not all of these gradients in that order, or in the other, times one factor, and zeros.
    """
    if any(each.layout is not torch.strided for each in tensors) or len(tensors) not in (1, ranks):
        return None
    with torch.no_grad():
        row = torch.cat([each.detach().reshape(-1) for each in tensors])
        order = [(name, weight.numel()) for name, weight in weights if name in local]
        size = sum(numel for _, numel in order)
        if not size or len(row) % ranks or not size <= len(row) < size + ranks * len(order):
            return None
        for names in (order, order[::-1]):
            factor = _factor(row, names, local, sketch)
            if factor:
                return np.stack([sketch(each) for each in row.chunk(ranks)]) / factor
    return None


class SteppedPart:
    """This rank's part of all weights in a row, as an optimizer is about to step it: `tensor`, the part at `place`."""

    def __init__(self, tensor: torch.Tensor, place: int):
        self._tensor, self._place, self._before = tensor, place, tensor.detach().clone()

    def is_old_in(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether the model's `weights`, in either order, have the part as it was before the step, and not as it is."""
        new = self._tensor.detach()
        if any(each.layout is not torch.strided for each in weights):
            return False
        for order in (weights, weights[::-1]):
            row = torch.cat([each.detach().reshape(-1) for each in order])
            there = row[self._place * new.numel() :][: new.numel()]
            here, before = (each.reshape(-1)[: len(there)].to(there.dtype) for each in (new, self._before))
            if len(there) and torch.equal(there, before) and not torch.equal(there, here):
                return True
        return False


def _factor(
    row: torch.Tensor,
    order: Sequence[tuple[str, int]],
    local: Mapping[str, Sequence[np.ndarray | None]],
    sketch: Sketcher,
) -> float:
    """The factor of the gradients in the row; 0.0 if the row is not made of them."""
    found, place = [], 0
    sums = {name: np.sum([each for each in local[name] if each is not None], axis=0) for name, _ in order}
    largest = max(float(np.linalg.norm(each)) for each in sums.values())
    for name, numel in order:
        there, own = sketch(row[place : place + numel]), sums[name]
        place += numel
        if np.linalg.norm(own) <= _SMALL * largest:
            continue
        factor = float(there @ own / (own @ own))
        if not abs(factor) or np.linalg.norm(there - factor * own) > _EXACT * np.linalg.norm(there):
            return 0.0
        found.append(factor)
    is_one = bool(found) and max(found) - min(found) <= _EXACT * max(map(abs, found))
    return found[0] if is_one and not row[place:].any() else 0.0
