"""Weights that a step has moved a little: of 32 bits the lower 20 travel, since all ranks know the upper ones."""

import sys
from collections.abc import Collection, Sequence
from typing import Self

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import Gather
from cos598d.shard.units import Unit

LEAST_ELEMENTS = 4096  # of a part that is worth the trouble
FORMS = (20, 24)  # how many bits of each weight travel
WHOLE = 32  # as it is
FAR = 32  # one in so many weights may have moved too far for the form
OVERFLOW = -1  # in place of a count: more have
HEAD_BYTES = 8  # the count, and the next step's form


class LowBytes(Gather):
    """All-gathers of one unit's float32 weights, (elements,), after each step; every rank has those of before it.

    Of the bits of a float32, read as an integer, the lower b say what it is now, if it has moved by less than
    2^(b-1) from what it was: of all integers with these bits it is the nearest. With b = 20 that is so of weights that
    have moved by less than 1/32 of themselves. By steps of 5e-5 all others are within 0.0016 of zero.

    1. `look`: before the step rank r notes its part.
    2. `start`: it packs its part, and sends it to every other rank: the lower bits of every weight, and of those that
       have moved further where they are and their upper bits, with room for one in FAR.
    3. `wait`: every rank puts together what it has received.
    Where there are too many for the room, the count says so, and the part follows as it is. With what it sends each
    rank says in which form its part will travel after the next step: in the first for which there was room in this one,
    and in one of fewer bits than now only where half of the room was enough.
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
        """The bits of each rank's part that travel after the next step."""
        return [part.form for part in self._packed]

    @forms.setter
    def forms(self, forms: Sequence[int]) -> None:
        for part, form in zip(self._packed, forms, strict=True):
            part.form = (*FORMS, WHOLE)[(*FORMS, WHOLE).index(form)]

    def tensors(self) -> list[torch.Tensor]:
        """What parts are packed in, and the own part as it was."""
        return [self._before, *(part.packed for part in self._packed)]


class _Part:
    """A rank's part of the weights, and its packed form: the count and the next form, places and upper halves of what
    has moved too far, the lower halves of all weights, and of their bits 16 to 23 all or the lower four."""

    def __init__(self, weights: torch.Tensor):
        self.weights, self.form = weights, FORMS[0]
        self.numbers = weights.view(torch.int32)
        self._elements, self._room = len(weights), room_of(len(weights))
        self.packed = torch.empty(packed_bytes(self._elements, FORMS[-1]), dtype=torch.uint8, device=weights.device)
        sizes = [HEAD_BYTES, 4 * self._room, 2 * self._room, 2 * self._elements, self._elements]
        head, places, upper, lower, self._middle = self.packed.split(sizes)
        self._head, self._places = head.view(torch.int32), places.view(torch.int32)
        self._upper, self._lower = upper.view(torch.int16), lower.view(torch.int16)

    def pack(self, before: torch.Tensor) -> None:
        """Pack the weights, which were `before`, (elements,) of their numbers; what is there is lost."""
        moved = torch.sub(self.numbers, before, out=before)
        places = _far(moved, self.form)
        count = len(places)
        overflows = count > self._room
        self._head[0], self._head[1] = OVERFLOW if overflows else count, self._following(moved, count)
        if overflows or self.form == WHOLE:
            return
        self._places[:count] = places
        self._upper[:count] = self.numbers[places] >> 16
        self._lower.copy_(self.numbers)  # cut off, as the middle bytes are
        middle = self.numbers >> 16
        if self.form == 24:
            self._middle.copy_(middle)
            return
        fours = torch.zeros(2 * len(self._pairs), dtype=torch.uint8, device=middle.device)
        fours[: self._elements].copy_(middle).bitwise_and_(15)
        together = fours.view(torch.int16)
        self._pairs.copy_(together | together >> 4)

    def _following(self, moved: torch.Tensor, count: int) -> int:
        """The form of the next step, where so many of those that have `moved`, (elements,), have moved too far."""
        if self.form == FORMS[0] and count <= self._room:
            return self.form
        for form in FORMS:
            room = self._room if form >= self.form else self._room // 2
            if len(_far(moved, form)) <= room:
                return form
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
        middle = self._middle
        if self.form == 20:
            together = self._pairs.short()
            middle = (together | together << 4).bitwise_and_(0x0F0F).view(torch.uint8)[: self._elements]
        bits = middle.int().bitwise_left_shift_(16).bitwise_or_(self._lower.int().bitwise_and_(0xFFFF))
        # From the lowest that it may be upwards, the first number with these bits.
        self.numbers -= 1 << (self.form - 1)
        self.numbers += bits.sub_(self.numbers).bitwise_and_((1 << self.form) - 1)
        places = self._places[:count].long()
        self.numbers[places] = self.numbers[places] & 0xFFFF | self._upper[:count].int() << 16

    @property
    def _pairs(self) -> torch.Tensor:
        """Where four bits of two weights are a byte."""
        return self._middle[: -(-self._elements // 2)]


def _far(moved: torch.Tensor, form: int) -> torch.Tensor:
    """The places in (elements,) of integers that have moved further than so many bits say; none where all bits do."""
    if form == WHOLE:
        return moved.new_empty(0, dtype=torch.int64)
    return ((moved + (1 << (form - 1))) >> form).nonzero().flatten()


def changed_in_forward(model: nn.Module) -> set[nn.Parameter]:
    """The weights that a forward changes, on every rank in its own way: of them the others do not know a byte."""
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm]
    return {p for table in tables for p in table.parameters(recurse=False)}


def is_packed(unit: Unit, changing: Collection[nn.Parameter]) -> bool:
    """Whether the unit's weights travel so; `changing` are those of `changed_in_forward`."""
    is_float = unit.dtype == torch.float32 and sys.byteorder == "little"
    are_large = len(unit.lengths) > 1 and min(unit.lengths) >= LEAST_ELEMENTS
    return is_float and are_large and not any(p in changing for _, p in unit.parameters)


def room_of(elements: int) -> int:
    """How many of so many weights may have moved too far."""
    return elements // FAR


def packed_bytes(elements: int, form: int = FORMS[0]) -> int:
    """The bytes in which a part of so many elements travels."""
    return HEAD_BYTES + 6 * room_of(elements) + -(-elements * form // 8)
