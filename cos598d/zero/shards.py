"""An optimizer that steps pieces of parameters, and its whole state."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from cos598d.records.conventions import STATE
from cos598d.state import by_parameter, number_device
from cos598d.sync.base import GradientSync
from cos598d.zero.collectives import start_all_gather
from cos598d.zero.elementwise import kinds_of_state
from cos598d.zero.unit import Piece, Unit


class Shards:
    """What this rank's optimizer steps: of each parameter the piece that lies in the rank's part of its unit.

    The optimizer stays the script's own object. In its groups, the pieces take the place of the parameters, so a
    schedule or a gradient scaler of the script works on. A rank has a piece of every parameter, maybe without elements:
    so the optimizers of all ranks have the same structure.
    """

    def __init__(self, units: Sequence[Unit], optimizer: torch.optim.Optimizer):
        self.optimizer, self._kinds = optimizer, kinds_of_state(optimizer)
        self.pieces = [Piece(unit, place) for unit in units for place in range(len(unit.named))]
        self.piece_of = {piece.parameter: piece for piece in self.pieces}
        for group in optimizer.param_groups:
            group["params"] = [self.piece_of[p].part if p in self.piece_of else p for p in group["params"]]
        optimizer.state.clear()

    def whole_state(self, sync: GradientSync) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizers of all ranks remember, whole, unit by unit. Every rank iterates to the end."""
        for unit in dict.fromkeys(piece.unit for piece in self.pieces):
            states = [(piece, self.optimizer.state.get(piece.part, {})) for piece in self.pieces if piece.unit is unit]
            for kind, is_number in self._kinds.items():
                found = {piece: value for piece, of in states if (value := of.get(kind)) is not None}
                if is_number:
                    yield from ((f"{kind}/{piece.name}", torch.as_tensor(one).cpu()) for piece, one in found.items())
                elif found:
                    whole = unit.empty(next(iter(found.values())).dtype)
                    for piece, value in found.items():
                        unit.part_of(whole)[piece.place] = value
                    start_all_gather(sync, unit, whole, f"{kind} of {unit.name}", STATE)()
                    yield from ((f"{kind}/{piece.name}", unit.view(whole, piece.number)) for piece in found)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let this rank's optimizer remember its pieces of a whole state, and nothing else."""
        self.optimizer.state.clear()
        of_parameter = by_parameter(state)
        for piece in self.pieces:
            for kind, value in of_parameter.get(piece.name, {}).items():
                is_number = self._kinds.get(kind, True)
                device = number_device(self.optimizer, piece.part) if is_number else piece.part.device
                own = value.to(device) if is_number else piece.of(value.to(device))
                self.optimizer.state[piece.part][kind] = own.clone()
