"""Weights that a step has moved a little: of 32 bits the lower 20 travel, since all ranks know the upper ones."""

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import WeightGather
from cos598d.strategies.parts.units import Unit

LEAST_ELEMENTS = 4096  # of a part that is worth the trouble
BITS = (20, 24)  # of each weight that are sent
WHOLE = 32  # as it is
ROOMS = (32, 64, 128, 512)  # one in so many weights may have moved too far for its bits
# A form is a number of bits, and in hundreds the place of a room in ROOMS.
LONGEST, SHORTEST = BITS[-1], BITS[0] + 100 * (len(ROOMS) - 1)
OVERFLOW = -1  # in place of a count: more have
HEAD_BYTES = 8  # the count, and the next step's form


class LowBytes(WeightGather):
    """All-gathers of one unit's float32 weights, (elements,), after each step; every rank has those of before it.

    Of the bits of a float32, read as an integer, the lower b say what it is now, if it has moved by less than
    2^(b-1) from what it was: of all integers with these bits it is the nearest. With b = 20 that is so of weights that
    have moved by less than 1/32 of themselves. By steps of 5e-5 all others are within 0.0016 of zero.

    1. `look`: before the step rank r notes its part.
    2. `start`: it packs its part, and sends it to every other rank: the lower bits of every weight, and of those that
       have moved further where they are and their upper bits, for which there is room.
    3. `wait`: every rank puts together what it has received.
    Where there are too many for the room, the count says so, and the part follows as it is. With what it sends each
    rank says in which form its part will travel after the next step: with the fewest bits for which the largest room
    was enough in this one, or half of it where these are fewer than now; and with the smallest room for twice as many
    as had moved too far.
    """

    def __init__(self, comm: Communicator, name: str, flat: torch.Tensor, lengths: Sequence[int], tag: int):
        """`flat` has the weights; lengths: the elements of each rank's part, none less than LEAST_ELEMENTS."""
        super().__init__(comm, name, flat, lengths, tag)
        self._packed = [_Part(part) for part in self._parts]
        self._own = self._packed[comm.rank]
        self._before = torch.empty_like(self._own.numbers)

    def look(self) -> None:
        """This rank's part is about to be stepped."""
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
        """In which form each rank's part travels after the next step."""
        return [part.form for part in self._packed]

    @forms.setter
    def forms(self, forms: Sequence[int]) -> None:
        for part, form in zip(self._packed, forms, strict=True):
            part.form = _EVERY[_EVERY.index(form)]

    def tensors(self) -> list[torch.Tensor]:
        """What parts are packed in, and the own part as it was."""
        return [self._before, *(part.packed for part in self._packed)]


class _Places(NamedTuple):
    """The packed form of a part behind its head: where the weights are that have moved too far, and their upper halves;
    of all weights the lower halves, and of their bits 16 to 23 all, or the lower four of two weights."""

    far: torch.Tensor
    upper: torch.Tensor
    lower: torch.Tensor
    middle: torch.Tensor


class _Part:
    """A rank's part of the weights, (elements,), and the bytes in which it is packed."""

    def __init__(self, weights: torch.Tensor):
        self.weights, self.form = weights, BITS[0]
        self.numbers = weights.view(torch.int32)
        self._elements = len(weights)
        self.packed = torch.empty(packed_bytes(self._elements, LONGEST), dtype=torch.uint8, device=weights.device)
        self._head = self.packed[:HEAD_BYTES].view(torch.int32)
        self._places: dict[int, _Places] = {}  # by form

    def pack(self, before: torch.Tensor) -> None:
        """Pack the weights, which were `before`, (elements,) of their numbers; what is there is lost."""
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
        places.lower.copy_(self.numbers)  # cut off, as the middle bytes are
        middle = self.numbers >> 16
        if _bits(self.form) == 24:
            places.middle.copy_(middle)
            return
        fours = torch.zeros(2 * len(places.middle), dtype=torch.uint8, device=middle.device)
        fours[: self._elements].copy_(middle).bitwise_and_(15)
        together = fours.view(torch.int16)
        places.middle.copy_(together | together >> 4)

    def _following(self, moved: torch.Tensor, count: int) -> int:
        """The form of the next step, where `count` of those that have `moved`, (elements,), have moved too far."""
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
        """Whether the weights have to follow what has come."""
        return self.form != WHOLE and self._head[0].item() == OVERFLOW

    def unpack(self, is_own: bool) -> None:
        """Have the weights that have come, unless they are there, and the form of the next."""
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
        # From the lowest that it may be upwards, the first number with these bits.
        self.numbers -= 1 << (bits - 1)
        self.numbers += known.sub_(self.numbers).bitwise_and_((1 << bits) - 1)
        far = places.far[:count].long()
        self.numbers[far] = self.numbers[far] & 0xFFFF | places.upper[:count].int() << 16

    def _cut(self) -> _Places:
        """What of the packed bytes is where in this form: cut once, since each step goes through them."""
        if self.form not in self._places:
            sizes = _sizes(self._elements, self.form)
            _, far, upper, lower, middle = self.packed[: sum(sizes)].split(sizes)
            halves = upper.view(torch.int16), lower.view(torch.int16)
            self._places[self.form] = _Places(far.view(torch.int32), *halves, middle)
        return self._places[self.form]


_EVERY = (*(bits + 100 * place for bits in BITS for place in range(len(ROOMS))), WHOLE)


def _bits(form: int) -> int:
    """How many of a weight's bits are sent in this form."""
    return form % 100


def _far(moved: torch.Tensor, bits: int) -> torch.Tensor:
    """The places in (elements,) of integers that have moved further than so many bits say; none where all bits do."""
    if bits == WHOLE:
        return moved.new_empty(0, dtype=torch.int64)
    return ((moved + (1 << (bits - 1))) >> bits).nonzero().flatten()


def changed_in_forward(model: nn.Module) -> set[nn.Parameter]:
    """The weights that a forward changes, on every rank in its own way: of them the others do not know a byte."""
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm]
    return {p for table in tables for p in table.parameters(recurse=False)}


def is_packed(unit: Unit, changing: Collection[nn.Parameter]) -> bool:
    """Whether the unit's weights travel so; `changing` are those of `changed_in_forward`."""
    is_float = unit.dtype == torch.float32 and sys.byteorder == "little"
    are_large = len(unit.lengths) > 1 and min(unit.lengths) >= LEAST_ELEMENTS
    return is_float and are_large and not any(p in changing for _, p in unit.parameters)


def room_of(elements: int, form: int) -> int:
    """How many of so many weights may have moved too far for this form."""
    return elements // ROOMS[form // 100]


def packed_bytes(elements: int, form: int = SHORTEST) -> int:
    """The bytes in which a part of so many elements travels."""
    return sum(_sizes(elements, form))


def _sizes(elements: int, form: int) -> list[int]:
    """The bytes of the head, and of what `_Places` has."""
    room = room_of(elements, form)
    return [HEAD_BYTES, 4 * room, 2 * room, 2 * elements, -(-elements * (_bits(form) - 16) // 8)]
