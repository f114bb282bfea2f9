"""An optimizer that steps pieces of parameters, and its whole state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import STATE
from cos598d.state import by_parameter, number_device
from cos598d.sync.base import GradientSync
from cos598d.zero.collectives import start_all_gather
from cos598d.zero.elementwise import check_elementwise
from cos598d.zero.unit import Piece, Unit


class Shards:
    """What this rank's optimizer steps: of each parameter the piece that lies in the rank's part of its unit.

    The optimizer stays the script's own object. In its groups, the pieces take the place of the parameters, so a
    schedule or a gradient scaler of the script works on. A rank has a piece of every parameter, maybe without elements:
    so the optimizers of all ranks have the same structure.
    """

    def __init__(self, units: Sequence[Unit], optimizer: torch.optim.Optimizer):
        self.optimizer, self._kinds, self._units = optimizer, check_elementwise(optimizer), list(units)
        self.pieces = [(unit, piece, nn.Parameter(unit.part[piece.place])) for unit in units for piece in unit.pieces()]
        self.own = {piece.parameter: part for _, piece, part in self.pieces}
        for group in optimizer.param_groups:
            group["params"] = [self.own.get(p, p) for p in group["params"]]
        optimizer.state.clear()

    def whole_state(self, sync: GradientSync) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizers of all ranks remember, whole, unit by unit. Every rank iterates to the end."""
        for unit in self._units:
            for kind in self._kinds:
                found = [(piece, self.optimizer.state.get(part, {}).get(kind)) for _, piece, part in self._of(unit)]
                found = [(piece, value) for piece, value in found if value is not None]
                if found and self._is_number(kind):
                    yield from ((f"{kind}/{piece.name}", torch.as_tensor(value).cpu()) for piece, value in found)
                elif found:
                    yield from self._whole(sync, unit, kind, found)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let this rank's optimizer remember its pieces of a whole state, and nothing else."""
        self.optimizer.state.clear()
        of_parameter = by_parameter(state)
        for unit, piece, part in self.pieces:
            for kind, value in of_parameter.get(piece.name, {}).items():
                if kind not in self._kinds:
                    name = type(self.optimizer).__name__
                    raise UserError(f"the state has {kind}, which {name} does not keep. Take the optimizer it is from.")
                if not self._is_number(kind):
                    own: Any = unit.own(piece, value.to(part.device)).clone()
                else:
                    own = value.to(number_device(self.optimizer, part), copy=True)
                    own = own if isinstance(self._kinds[kind], torch.Tensor) else own.item()
                self.optimizer.state[part][kind] = own

    def _of(self, unit: Unit) -> list[tuple[Unit, Piece, nn.Parameter]]:
        return [one for one in self.pieces if one[0] is unit]

    def _whole(
        self, sync: GradientSync, unit: Unit, kind: str, found: list[tuple[Piece, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        whole = unit.empty(found[0][1].dtype)
        part = unit.part_of(whole).zero_()
        for piece, value in found:
            part[piece.place] = value
        start_all_gather(sync, unit, whole, part, f"{kind} of {unit.name}", STATE)()
        remembered = {piece.parameter for piece, _ in found}
        for place, (name, p) in enumerate(unit.named):
            if p in remembered:
                yield f"{kind}/{name}", unit.view(whole, place)

    def _is_number(self, kind: str) -> bool:
        """Whether a parameter has one number of this kind, such as how many steps it has had."""
        value = self._kinds.get(kind)
        return not isinstance(value, torch.Tensor) or value.dim() == 0
