"""Weights that a step has changed little: only the lower 20 of 32 bits are sent, since all ranks know the others."""

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import WeightGather
from cos598d.strategies.parts.units import Unit

LEAST_ELEMENTS = 4096  # smaller parts are not worth packing
BITS = (20, 24)  # how many bits of each weight are sent
WHOLE = 32  # all bits, unpacked
ROOMS = (32, 64, 128, 512)  # one in this many weights may have moved too far for its bits
# A form is a number of bits plus 100 times an index into ROOMS.
LONGEST, SHORTEST = BITS[-1], BITS[0] + 100 * (len(ROOMS) - 1)
OVERFLOW = -1  # replaces the count if more have moved too far
HEAD_BYTES = 8  # the count, and the next step's form


class LowBytes(WeightGather):
    """All-gathers of one unit's float32 weights, (elements,), after each step. Every rank has the previous weights.

    A float32 is read as an integer. If it has moved by less than 2^(b-1), its lower b bits are enough: the new value is
    the integer nearest to the old one with these lower bits. With b = 20 this covers weights that have moved by less
    than 1/32 of themselves. With steps of 5e-5, all other weights are within 0.0016 of zero.

    1. `look`: before the step, rank r copies its part.
    2. `start`: it packs its part and sends it to every other rank: the lower bits of every weight, and the indices and
       upper bits of those that have moved further.
    3. `wait`: every rank unpacks what it has received.
    There is room for a limited number of weights that moved further. If there are more, the count shows it, and the
    whole part follows unpacked.
    Each message also has the form for the next step. Its bits are the smallest b with overflow(b) <= room(b), or
    room(b)/2 if b is smaller than now. room(b) is the largest room. Its room is the smallest one >= 2 overflow(b).
    """

    def __init__(self, comm: Communicator, name: str, flat: torch.Tensor, lengths: Sequence[int], tag: int):
        """`flat` has the weights. lengths: the elements of each rank's part, each at least LEAST_ELEMENTS."""
        super().__init__(comm, name, flat, lengths, tag)
        self._packed = [_Part(part) for part in self._parts]
        self._own = self._packed[comm.rank]
        self._before = torch.empty_like(self._own.numbers)

    def look(self) -> None:
        """Copy this rank's part before it is stepped."""
        self._before.copy_(self._own.numbers)

    def start(self) -> Self:
        self._own.pack(self._before)
        return super().start()

    def messages(self, rank: int) -> list[torch.Tensor]:
        return self._packed[rank].messages()

    def wait(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        self._messages.wait()
        late = {other: part.weights for other, part in enumerate(self._packed) if part.overflows()}
        if late:
            own = late.pop(self._comm.rank, None)
            sends = [] if own is None else [(own, other) for other in self._comm.others]
            call.start(sends, [(late[other], other) for other in self._comm.others if other in late], self._tag).wait()
        for part in self._packed:
            part.unpack(is_own=part is self._own)
        call.end()

    @property
    def forms(self) -> list[int]:
        """The form of each rank's part after the next step."""
        return [part.form for part in self._packed]

    @forms.setter
    def forms(self, forms: Sequence[int]) -> None:
        for part, form in zip(self._packed, forms, strict=True):
            part.form = _EVERY[_EVERY.index(form)]

    def tensors(self) -> list[torch.Tensor]:
        """The packed parts, and this rank's part as it was."""
        return [self._before, *(part.packed for part in self._packed)]


class _Places(NamedTuple):
    """The packed form of a part, after its header. far: indices of weights that moved too far; upper: their upper
    halves. lower: the lower halves of all weights; middle: their bits 16 to 23, or 16 to 19 of two weights per byte."""

    far: torch.Tensor
    upper: torch.Tensor
    lower: torch.Tensor
    middle: torch.Tensor


class _Part:
    """A rank's part of the weights, (elements,), and its packed bytes."""

    def __init__(self, weights: torch.Tensor):
        self.weights, self.form = weights, BITS[0]
        self.numbers = weights.view(torch.int32)
        self._elements = len(weights)
        self.packed = torch.empty(packed_bytes(self._elements, LONGEST), dtype=torch.uint8, device=weights.device)
        self._head = self.packed[:HEAD_BYTES].view(torch.int32)
        self._places: dict[int, _Places] = {}  # by form

    def pack(self, before: torch.Tensor) -> None:
        """Pack the weights. `before` are their old values as integers, (elements,); it is overwritten."""
        moved = torch.sub(self.numbers, before, out=before)
        far = _far(moved, _bits(self.form))
        count = len(far)
        overflows = count > room_of(self._elements, self.form)
        self._head[0], self._head[1] = OVERFLOW if overflows else count, self._following(moved, count)
        if overflows or self.form == WHOLE:
            return
        places = self._cut()
        places.far[:count] = far
        places.upper[:count] = self.numbers[far] >> 16
        places.lower.copy_(self.numbers)  # the upper bits are cut off, as with the middle bytes
        middle = self.numbers >> 16
        if _bits(self.form) == 24:
            places.middle.copy_(middle)
            return
        fours = torch.zeros(2 * len(places.middle), dtype=torch.uint8, device=middle.device)
        fours[: self._elements].copy_(middle).bitwise_and_(15)
        together = fours.view(torch.int16)
        places.middle.copy_(together | together >> 4)

    def _following(self, moved: torch.Tensor, count: int) -> int:
        """The form of the next step, if `count` of these differences, (elements,), do not fit the current one."""
        for bits in BITS:
            far = count if bits == _bits(self.form) else len(_far(moved, bits))
            room = room_of(self._elements, bits)
            if far <= (room if bits >= _bits(self.form) else room // 2):
                forms = [bits + 100 * place for place in range(1, len(ROOMS))]
                return max((form for form in forms if 2 * far <= room_of(self._elements, form)), default=bits)
        return WHOLE

    def messages(self) -> list[torch.Tensor]:
        if self.form == WHOLE:
            return [self.packed[:HEAD_BYTES], self.weights]
        return [self.packed[: packed_bytes(self._elements, self.form)]]

    def overflows(self) -> bool:
        """Whether the unpacked weights have to follow."""
        return self.form != WHOLE and self._head[0].item() == OVERFLOW

    def unpack(self, is_own: bool) -> None:
        """Write the received weights, except on their own rank, and keep the form of the next step."""
        count, following = self._head.tolist()
        if not (is_own or self.form == WHOLE or count == OVERFLOW):
            self._put_together(count)
        self.form = following

    def _put_together(self, count: int) -> None:
        places, bits = self._cut(), _bits(self.form)
        middle = places.middle
        if bits == 20:
            together = middle.short()
            middle = (together | together << 4).bitwise_and_(0x0F0F).view(torch.uint8)[: self._elements]
        known = middle.int().bitwise_left_shift_(16).bitwise_or_(places.lower.int().bitwise_and_(0xFFFF))
        # The first integer with these bits, counted up from the lowest possible one.
        self.numbers -= 1 << (bits - 1)
        self.numbers += known.sub_(self.numbers).bitwise_and_((1 << bits) - 1)
        far = places.far[:count].long()
        self.numbers[far] = self.numbers[far] & 0xFFFF | places.upper[:count].int() << 16

    def _cut(self) -> _Places:
        """The places of the packed bytes for the current form; cached, since every step needs them."""
        if self.form not in self._places:
            sizes = _sizes(self._elements, self.form)
            _, far, upper, lower, middle = self.packed[: sum(sizes)].split(sizes)
            halves = upper.view(torch.int16), lower.view(torch.int16)
            self._places[self.form] = _Places(far.view(torch.int32), *halves, middle)
        return self._places[self.form]


_EVERY = (*(bits + 100 * place for bits in BITS for place in range(len(ROOMS))), WHOLE)


def _bits(form: int) -> int:
    """How many bits of a weight this form sends."""
    return form % 100


def _far(moved: torch.Tensor, bits: int) -> torch.Tensor:
    """The indices of differences, (elements,), that do not fit into this many bits; none if all bits are sent."""
    if bits == WHOLE:
        return moved.new_empty(0, dtype=torch.int64)
    return ((moved + (1 << (bits - 1))) >> bits).nonzero().flatten()


def changed_in_forward(model: nn.Module) -> set[nn.Parameter]:
    """The weights that a forward changes. Each rank changes them differently, so others know none of their bits."""
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm]
    return {p for table in tables for p in table.parameters(recurse=False)}


def is_packed(unit: Unit, changing: Collection[nn.Parameter]) -> bool:
    """Whether the unit's weights can be sent packed. `changing` is the result of `changed_in_forward`."""
    is_float = unit.dtype == torch.float32 and sys.byteorder == "little"
    are_large = len(unit.lengths) > 1 and min(unit.lengths) >= LEAST_ELEMENTS
    return is_float and are_large and not any(p in changing for _, p in unit.parameters)


def room_of(elements: int, form: int) -> int:
    """How many of `elements` weights may have moved too far in this form."""
    return elements // ROOMS[form // 100]


def packed_bytes(elements: int, form: int = SHORTEST) -> int:
    """The bytes that are sent for a part of `elements` weights."""
    return sum(_sizes(elements, form))


def _sizes(elements: int, form: int) -> list[int]:
    """The bytes of the header and of the fields of `_Places`."""
    room = room_of(elements, form)
    return [HEAD_BYTES, 4 * room, 2 * room, 2 * elements, -(-elements * (_bits(form) - 16) // 8)]
