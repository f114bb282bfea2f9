"""Weights that a step has changed by little: three bytes of four travel, since all ranks know the highest one."""

import sys
from collections.abc import Collection, Sequence
from typing import Self

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import Gather
from cos598d.shard.units import Unit

LEAST_ELEMENTS = 4096  # of a part that is worth the trouble
CHANGE = 32  # one in so many weights may change its highest byte: fine-tuning with AdamW by 5e-5 changes one in 200
OVERFLOW = -1  # in place of a count: more have changed


class LowBytes(Gather):
    """All-gathers of one unit's float32 weights, (elements,), after each step; every rank has those of before it.

    A float32's highest byte is its sign and all but the last bit of its exponent. A step changes it where a weight
    crosses zero or a power of four: of weights about 0 with a deviation of d, which move by s, some (s/d) log(d/s).

    1. `look`: before the step rank r notes the highest bytes of its part.
    2. `start`: it packs its part, and sends it to every other rank: how many highest bytes have changed, where and to
       what, with room for one in CHANGE, and the three lower bytes of every weight.
    3. `wait`: every rank puts together what it has received.
    Where there are too many for the room, the count says so, and the part follows as it is. From then on it travels as
    it is, behind its count, until one is small enough again.
    """

    def __init__(self, comm: Communicator, name: str, flat: torch.Tensor, lengths: Sequence[int], tag: int):
        """`flat` has the weights; lengths: the elements of each rank's part, none less than LEAST_ELEMENTS."""
        super().__init__(comm, name, flat, lengths, tag)
        self._packed = [_Part(part) for part in self._parts]
        self._own = self._packed[comm.rank]

    def look(self) -> None:
        """This rank's part is about to be stepped."""
        self._own.look()

    def start(self) -> Self:
        self._own.pack()
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
    def whole(self) -> list[bool]:
        """Of each rank's part whether it travels as it is."""
        return [part.is_whole for part in self._packed]

    @whole.setter
    def whole(self, are: Sequence[bool]) -> None:
        for part, is_whole in zip(self._packed, are, strict=True):
            part.is_whole = bool(is_whole)

    def tensors(self) -> list[torch.Tensor]:
        """What parts are packed in."""
        return [part.packed for part in self._packed]


class _Part:
    """A rank's part of the weights, and its packed form: a count, that many places and new highest bytes, and the lower
    bytes of all weights, two and one."""

    def __init__(self, weights: torch.Tensor):
        self.weights, self.is_whole = weights, False
        elements, room = len(weights), room_of(len(weights))
        self.packed = torch.empty(packed_bytes(elements), dtype=torch.uint8, device=weights.device)
        count, places, low, third, highest = self.packed.split([4, 4 * room, 2 * elements, elements, room])
        self._count, self._places, self._low = count.view(torch.int32), places.view(torch.int32), low.view(torch.int16)
        self._third, self._highest = third, highest
        of_weights = weights.view(torch.uint8).view(elements, 4)  # the lowest first
        self._low_of_weights = weights.view(torch.int16).view(elements, 2)[:, 0]
        self._third_of_weights, self._highest_of_weights = of_weights[:, 2], of_weights[:, 3]

    def look(self) -> None:
        self._before = self._highest_of_weights.clone()

    def pack(self) -> None:
        changed = (self._highest_of_weights != self._before).nonzero().flatten()
        del self._before
        if len(changed) > len(self._places):
            self._count.fill_(OVERFLOW)
            return
        self._count.fill_(len(changed))
        if not self.is_whole:
            self._places[: len(changed)] = changed
            self._highest[: len(changed)] = self._highest_of_weights[changed]
            self._low.copy_(self._low_of_weights)
            self._third.copy_(self._third_of_weights)

    def messages(self) -> list[torch.Tensor]:
        return [self.packed[:4], self.weights] if self.is_whole else [self.packed]

    def overflows(self) -> bool:
        """Whether the weights have to follow what has come."""
        return not self.is_whole and self._count.item() == OVERFLOW

    def unpack(self, is_own: bool) -> None:
        count = int(self._count)
        if not (is_own or self.is_whole or count == OVERFLOW):
            self._low_of_weights.copy_(self._low)
            self._third_of_weights.copy_(self._third)
            self._highest_of_weights[self._places[:count].long()] = self._highest[:count]
        self.is_whole = count == OVERFLOW


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
    """How many highest bytes may change among so many."""
    return elements // CHANGE


def packed_bytes(elements: int) -> int:
    """The bytes in which a part of so many elements travels."""
    return 4 + 3 * elements + 5 * room_of(elements)
