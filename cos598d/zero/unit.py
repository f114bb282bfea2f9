"""A unit: some parameters side by side in one flat tensor, which is cut into a part for each rank."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.base import Named
from cos598d.zero.unread import Unread


class Unit:
    """Some parameters of one dtype, side by side in a flat tensor that is padded and cut into n equal parts.

    A parameter keeps its own strides if its memory is dense, as a channels_last weight's is. A unit is filled and
    handed out as a bucket is (`sync/buckets.py`).

    weights: the flat tensor, of which the parameters are views. part: rank r's n-th of it. views: this rank's piece of
    each parameter. gradients: this rank's, divided by n, in the same layout, while they are collected. call: brings all
    ranks' gradients of part r, (n, length), into `arriving`. average: their sum. The last four are None where there are
    none.
    """

    def __init__(self, name: str, named: Sequence[Named], rank: int, ranks: int, align: int = 1):
        """A part is a multiple of `align` elements: of a row, where a matrix must be cut between rows."""
        self.number, self.name, self.named, self.rank, self.ranks = 0, name, list(named), rank, ranks
        *begins, size = accumulate((p.numel() for _, p in named), initial=0)
        self.length = max(1, -(-size // (ranks * align))) * align
        self.gradients: Any = None
        self.arriving: Any = None
        self.average: Any = None
        self.call: Any = None
        self.views = {p: Piece(self, name, p, begin) for (name, p), begin in zip(named, begins, strict=True)}
        self.missing = set(self.views)  # to come in this step
        self.is_freed = False
        self.hold(self.empty().zero_())

    def empty(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new flat tensor of this layout, (n x length,). Its values are not set."""
        return self.named[0][1].new_empty(self.length * self.ranks, dtype=dtype)

    def hold(self, weights: torch.Tensor) -> None:
        """Lay the parameters into this flat tensor, with their values, and let them be views of it."""
        self.weights, self.part = weights, self.part_of(weights)
        self._places = {p: piece.whole(weights) for p, piece in self.views.items()}
        for p, place in self._places.items():
            p.data = place.copy_(p.data)

    def check(self) -> None:
        """Raise UserError if the script has given a parameter other memory, or has changed one that is freed."""
        places = self._nans if self.is_freed else self._places.values()
        for own, (p, piece) in zip(places, self.views.items(), strict=True):
            if p.data_ptr() != own.data_ptr() or (self.is_freed and not own.isnan()):
                raise UserError(
                    f"{piece.name} was given other memory, as by p.data = values, or was changed while its weights "
                    "were on other ranks. Change weights in place, as by p.copy_(values), and under zero3 only after "
                    "settle()."
                )
            if piece.part.grad is None and isinstance(p.grad, Unread):  # by optimizer.zero_grad()
                p.grad = None

    def take(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient, zeros if it has none, into its place among the unit's."""
        self.missing.discard(parameter)
        piece = self.views[parameter]
        piece.make_room(parameter)  # backward may have left it out
        self.put(piece, parameter.grad)
        parameter.grad = None if parameter.grad is None else piece.unread

    def put(self, piece: "Piece", gradient: torch.Tensor | None) -> None:
        """Copy a gradient to the others, divided by n: so the sum of 16-bit numbers fits where their average does."""
        if self.gradients is None:
            self.gradients = self.empty()
        view = piece.whole(self.gradients)
        if gradient is None:
            view.zero_()
        else:
            torch.mul(gradient.to_dense(), 1 / self.ranks, out=view)

    def hand_out(self, is_used: Mapping[nn.Parameter, bool]) -> None:
        """Give each piece its average, which is added to that of an earlier backward. One that no rank used: None."""
        for p, piece in self.views.items():
            if is_used[p]:
                average, part = self.average[piece.place], piece.part
                part.grad = average if part.grad is None else part.grad.add_(average)
                p.grad = piece.unread
        self.average, self.missing = None, set(self.views)

    def free(self) -> None:
        """Give back the weights' memory. A parameter is NaN from here: one number, which stands for all."""
        self._nans = self.weights.new_full((len(self.named),), torch.nan)
        for nan, (_, p) in zip(self._nans, self.named, strict=True):
            p.data = nan.expand(p.shape)
        # The storage stays as an object: what autograd has saved of it is valid again when it is filled again.
        self.weights.untyped_storage().resize_(0)
        self.is_freed = True

    def allocate(self) -> None:
        """Give the weights memory again, with this rank's part. The others' come later."""
        self.weights.untyped_storage().resize_(self.weights.nbytes)
        self.part_of(self.weights).copy_(self.part)
        self.is_freed = False

    def show(self) -> None:
        """Let the parameters be views of the weights again."""
        for p, place in self._places.items():
            p.data = place

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, (length,), as a view."""
        return flat[self.rank * self.length : (self.rank + 1) * self.length]


class Piece:
    """What this rank has, and steps, of a unit's parameter. It may have no elements.

    place: where it lies in the rank's part. part: that as a parameter by itself, for an optimizer.
    unread: what .grad is while the rank has only this piece of the average.
    """

    part: nn.Parameter  # made with the optimizer that steps it

    def __init__(self, unit: Unit, name: str, parameter: nn.Parameter, begin: int):
        """`begin`: where the parameter begins in the unit."""
        self.unit, self.name, self.parameter, self._begin = unit, name, parameter, begin
        self._strides = torch.empty_like(parameter, device="meta").stride()
        self._first = unit.rank * unit.length
        low = max(begin, self._first)
        high = max(low, min(begin + parameter.numel(), self._first + unit.length))
        self.place = slice(low - self._first, high - self._first)
        self.unread = Unread(parameter)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's place in a flat tensor of the unit's layout, with the parameter's shape and strides."""
        return flat.as_strided(self.parameter.shape, self._strides, flat.storage_offset() + self._begin)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This piece of a tensor of the parameter's shape, with any strides, as a flat tensor."""
        if whole.stride() != self._strides:
            whole = torch.empty_strided(whole.shape, self._strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        begin = self._first + self.place.start - self._begin
        return whole.as_strided((whole.numel(),), (1,))[begin : begin + self.part.numel()]

    def make_room(self, parameter: nn.Parameter) -> None:
        """A gradient is about to be added to .grad. If there is an average, only the piece keeps it."""
        if parameter.grad is None:  # the script has dropped it
            self.part.grad = None
        elif isinstance(parameter.grad, Unread):
            parameter.grad = None
            if self.part.grad is not None:
                self.part.grad = self.part.grad.clone()  # its memory gets the next backward's
