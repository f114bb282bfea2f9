"""An optimizer that steps pieces of parameters, and its whole state."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import STATE
from cos598d.state import by_parameter, remember
from cos598d.sync.base import GradientSync
from cos598d.zero.collectives import start_all_gather
from cos598d.zero.unit import Piece, Unit
from cos598d.zero.unread import Unread

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop")  # of torch's optimizers
NUMBERS = ("step", "mu_product")  # what these remember once per parameter, also of one that is a number itself


class Shards:
    """What this rank's optimizer steps: of each parameter the piece that lies in the rank's part of its unit.

    The optimizer stays the script's own object. In its groups, the pieces take the place of the parameters, so a
    schedule or a gradient scaler of the script works on. A rank has a piece of every parameter, maybe without elements:
    so the optimizers of all ranks have the same structure.
    """

    def __init__(self, units: Sequence[Unit], optimizer: torch.optim.Optimizer):
        """Raises UserError for an optimizer of which nobody says that it treats every element by itself."""
        kind = type(optimizer)
        if kind not in [getattr(torch.optim, name) for name in ELEMENTWISE] and not getattr(kind, "elementwise", False):
            raise UserError(
                f"{kind.__name__} may not step shards of parameters as whole ones. Take {', '.join(ELEMENTWISE)}, "
                "set elementwise = True in a class of your own that treats every element by itself, or choose a sync "
                "without shards, such as bucketed."
            )
        self.optimizer, self.units = optimizer, units
        self.piece_of = {p: piece for unit in units for p, piece in unit.views.items()}
        for number, unit in enumerate(units):
            unit.number = number
        for piece in self.piece_of.values():
            piece.part = nn.Parameter(piece.unit.part[piece.place])
        for group in optimizer.param_groups:
            group["params"] = [self.piece_of[p].part if p in self.piece_of else p for p in group["params"]]
        optimizer.state.clear()

    def averaged(self) -> list[Piece]:
        """The pieces that have a gradient. Raises UserError for one that is not the average."""
        for p, piece in self.piece_of.items():
            if p.grad is None:  # the script has dropped it
                piece.part.grad = None
            elif not isinstance(p.grad, Unread):
                raise UserError(
                    f"{piece.name} has a gradient that is not averaged: the script's own, or that of a backward inside "
                    "no_sync. End each step with a backward outside of no_sync, or choose a sync without shards, such "
                    "as bucketed."
                )
        return [piece for piece in self.piece_of.values() if piece.part.grad is not None]

    def whole_state(self, sync: GradientSync) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizers of all ranks remember, whole, unit by unit. Every rank iterates to the end."""
        for unit in self.units:
            states = {piece: self.optimizer.state.get(piece.part, {}) for piece in unit.views.values()}
            for kind in dict.fromkeys(kind for of in states.values() for kind in of):
                values = {piece: of.get(kind) for piece, of in states.items()}
                found = {piece: torch.as_tensor(value) for piece, value in values.items() if value is not None}
                if all(value.dim() == 0 for value in found.values()):
                    yield from ((f"{kind}/{piece.name}", value.cpu()) for piece, value in found.items())
                else:
                    whole = unit.empty(next(iter(found.values())).dtype)
                    for piece, value in found.items():
                        unit.part_of(whole)[piece.place] = value
                    start_all_gather(sync, unit, whole, f"{kind} of {unit.name}", STATE)()
                    yield from ((f"{kind}/{piece.name}", piece.whole(whole)) for piece in found)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let this rank's optimizer remember its pieces of a whole state, and nothing else."""
        found = by_parameter(state)
        pieces: dict[torch.Tensor, dict[str, torch.Tensor]] = {
            piece.part: {
                kind: value if kind in NUMBERS or value.dim() < p.dim() else piece.of(value)
                for kind, value in found.get(piece.name, {}).items()
            }
            for p, piece in self.piece_of.items()
        }
        remember(self.optimizer, pieces)
