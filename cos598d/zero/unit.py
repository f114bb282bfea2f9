"""A unit: some parameters side by side in one flat tensor, which is cut into a part for each rank."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.base import Named


class Piece(NamedTuple):
    """What one rank's part has of a parameter: `part[place]`. It may have no elements.

    begin: the first of these elements, counted in the parameter's own memory.
    """

    name: str
    parameter: nn.Parameter
    place: slice
    begin: int


class Unit:
    """Some parameters of one dtype, side by side in a flat tensor that is padded and cut into n equal parts.

    A parameter keeps its own strides if its memory is dense, as a channels_last weight's is.

    weights: the flat tensor, of which the parameters are views. part: rank r's n-th of it.
    gradients: this rank's, in the same layout, while they are collected. is_freed: the weights' memory is given back;
    stand_ins: then one number for each parameter.
    """

    def __init__(self, number: int, name: str, named: Sequence[Named], rank: int, ranks: int, align: int = 1):
        """A part is a multiple of `align` elements: parts begin on a cache line, or between the rows of a matrix."""
        self.number, self.name, self.named, self.rank, self.ranks = number, name, list(named), rank, ranks
        self.align, self.dtype = align, named[0][1].dtype
        self.sizes = [p.numel() for _, p in named]
        self.length = max(1, -(-sum(self.sizes) // (ranks * align))) * align
        self._strides = [torch.empty_like(p, device="meta").stride() for _, p in named]
        self.weights = self.part = torch.empty(0)
        self.gradients: torch.Tensor | None = None
        self.gradient_views: list[torch.Tensor] = []
        self.is_freed = False
        self.stand_ins = torch.empty(0)

    def empty(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new flat tensor of this layout, (n x length,). Its values are not set."""
        p = self.named[0][1]
        return torch.empty(self.length * self.ranks, dtype=dtype or p.dtype, device=p.device)

    def hold(self, weights: torch.Tensor) -> None:
        """Lay the parameters into this flat tensor, with their values, and let them be views of it."""
        self.weights, self.part = weights, self.part_of(weights)
        weights[sum(self.sizes) :].zero_()
        self._places = self.views(weights)
        for place, (_, p) in zip(self._places, self.named, strict=True):
            p.data = place.copy_(p.data)

    def collect(self, gradients: torch.Tensor | None) -> None:
        """Let gradients be collected in this flat tensor, or in none."""
        self.gradients, self.gradient_views = gradients, []
        if gradients is not None:
            self.gradient_views = self.views(gradients)
            gradients[sum(self.sizes) :].zero_()

    @property
    def flat_gradients(self) -> torch.Tensor:
        """The flat tensor in which gradients are collected."""
        assert self.gradients is not None
        return self.gradients

    def take_moved(self) -> None:
        """Lay a parameter into its place again where the script has given it other memory, by `p.data = values`."""
        for place, (name, p) in zip(self._places, self.named, strict=True):
            if p.data_ptr() != place.data_ptr() or p.stride() != place.stride():
                check_alike(name, p, place)
                p.data = place.copy_(p.data)

    def take_written(self) -> None:
        """Take into this rank's part what the script has given freed parameters: `p.data = ...`, `p.fill_(...)`."""
        moved = [p.data_ptr() != mark.data_ptr() for mark, (_, p) in zip(self.stand_ins, self.named, strict=True)]
        if any(moved) or not self.stand_ins.isnan().all():
            for is_moved, mark, place, piece in zip(moved, self.stand_ins, self._places, self.pieces(), strict=True):
                if is_moved or not mark.isnan():
                    check_alike(piece.name, piece.parameter, place)
                    self.part[piece.place] = self.own(piece, piece.parameter.data)
            self.stand_in()

    def free(self) -> None:
        """Give back the weights' memory. A parameter's values are NaN from here: one number, which stands for all."""
        self.stand_in()
        # The storage stays as an object: what autograd has saved of it is valid again when it is filled again.
        self.weights.untyped_storage().resize_(0)
        self.is_freed = True

    def stand_in(self) -> None:
        """Let each parameter be NaN, of its own number in `stand_ins`."""
        self.stand_ins.fill_(torch.nan)
        for number, (_, p) in zip(self.stand_ins, self.named, strict=True):
            p.data = number.expand(p.shape)

    def show(self) -> None:
        """Let the parameters be views of the weights again."""
        for place, (_, p) in zip(self._places, self.named, strict=True):
            p.data = place

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat tensor, as views of their shapes and strides."""
        parts = flat[: sum(self.sizes)].split(self.sizes)
        laid = zip(parts, self.named, self._strides, strict=True)
        return [part.as_strided(p.shape, strides) for part, (_, p), strides in laid]

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, (length,), as a view."""
        return flat[self.rank * self.length : (self.rank + 1) * self.length]

    def own(self, piece: Piece, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor of the parameter's shape, with any strides, as a flat tensor."""
        strides = self._strides[[p is piece.parameter for _, p in self.named].index(True)]
        if whole.stride() != strides:
            whole = torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        flat = whole.as_strided((whole.numel(),), (1,))
        return flat[piece.begin : piece.begin + piece.place.stop - piece.place.start]

    def pieces(self) -> Iterator[Piece]:
        """What this rank's part has of each parameter, in their order."""
        first, begin = self.rank * self.length, 0
        for (name, p), size in zip(self.named, self.sizes, strict=True):
            low = max(begin, first)
            high = max(low, min(begin + size, first + self.length))
            yield Piece(name, p, slice(low - first, high - first), low - begin)
            begin += size


def check_alike(name: str, p: nn.Parameter, place: torch.Tensor) -> None:
    """Raise UserError if a parameter does not fit into its place any more."""
    if p.shape != place.shape or p.dtype != place.dtype or p.device != place.device:
        raise UserError(
            f"{name} is now {tuple(p.shape)} {p.dtype} on {p.device}, and was {tuple(place.shape)} {place.dtype} on "
            f"{place.device} when the model was wrapped. Wrap it after such a change."
        )
