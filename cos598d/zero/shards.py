"""An optimizer that steps pieces of parameters, and its whole state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cos598d.errors import UserError
from cos598d.records.conventions import STATE
from cos598d.state import by_parameter, number_device
from cos598d.sync.base import GradientSync
from cos598d.zero.collectives import start_all_gather
from cos598d.zero.elementwise import check_elementwise
from cos598d.zero.unit import Unit


class Shards:
    """What this rank's optimizer steps: of each parameter the piece that lies in the rank's part of its unit.

    The optimizer stays the script's own object. In its groups, the pieces take the place of the parameters, so a
    schedule or a gradient scaler of the script works on. A rank has a piece of every parameter, maybe without elements:
    so the optimizers of all ranks have the same structure.
    """

    def __init__(self, units: Sequence[Unit], optimizer: torch.optim.Optimizer):
        self.optimizer, self._kinds = optimizer, check_elementwise(optimizer)
        self._pieces_of = {unit: unit.pieces() for unit in units}
        self.pieces = [piece for pieces in self._pieces_of.values() for piece in pieces]
        self.piece_of = {piece.parameter: piece for piece in self.pieces}
        for group in optimizer.param_groups:
            group["params"] = [self.piece_of[p].part if p in self.piece_of else p for p in group["params"]]
        optimizer.state.clear()

    def whole_state(self, sync: GradientSync) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizers of all ranks remember, whole, unit by unit. Every rank iterates to the end."""
        for unit, pieces in self._pieces_of.items():
            for kind in self._kinds:
                values = {piece: self.optimizer.state.get(piece.part, {}).get(kind) for piece in pieces}
                found = {piece: value for piece, value in values.items() if value is not None}
                if self._is_number(kind):
                    yield from (
                        (f"{kind}/{piece.name}", torch.as_tensor(value).cpu()) for piece, value in found.items()
                    )
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
                if kind not in self._kinds:
                    name = type(self.optimizer).__name__
                    raise UserError(f"the state has {kind}, which {name} does not keep. Take the optimizer it is from.")
                if not self._is_number(kind):
                    own: Any = piece.of(value.to(piece.part.device)).clone()
                else:
                    own = value.to(number_device(self.optimizer, piece.part), copy=True)
                    own = own if isinstance(self._kinds[kind], torch.Tensor) else own.item()
                self.optimizer.state[piece.part][kind] = own

    def _is_number(self, kind: str) -> bool:
        """Whether a parameter has one number of this kind, such as how many steps it has had."""
        value = self._kinds.get(kind)
        return not isinstance(value, torch.Tensor) or value.dim() == 0
