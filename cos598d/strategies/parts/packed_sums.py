"""Reduce-scatters whose pieces are sent in fewer bits, with the same sums to the last bit.

A float32's exponent is sent in four bits, as its distance below the largest in its block. A gradient's sign and
mantissa are nearly random. Its exponent is not, since neighbours have similar sizes. In a block of a layer's gradient,
hardly one number in ten thousand is 2^14 times smaller than the largest.
"""

import sys
from collections.abc import Iterator, Mapping

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import SEGMENT_BYTES, ReduceScatters, Segment, segment_count
from cos598d.comm.messages import Places

ALIGNMENT = 8  # bytes: packed pieces begin at multiples of this
BLOCK = 64  # how many numbers share one largest exponent
FAR, LEAST_ROOM = 64, 16  # one number in FAR, plus LEAST_ROOM, may be too far below it
HEAD_BYTES = 8  # for their count
NO_ROOM = -1  # replaces the count if there are more
OWN, ZERO = 14, 15  # special codes: the exponent is too far below; the exponent is 0, as for a zero


class PackedReduceScatters(ReduceScatters):
    """As ReduceScatters, but pieces of float32 tensors are packed while they are sent (`pack`).

    1. A piece is packed in scratch, and sent from there.
    2. When all of a segment has arrived, it is unpacked, and added up in order of rank as usual.
    3. If a piece did not fit into its packed form, a flag shows that, and the piece follows unpacked. It goes only from
       its sender to its receiver, in the order in which segments end.
    Scratch holds what is received and sent of up to `IN_FLIGHT` segments, packed, and one unpacked segment.
    """

    def __init__(self, comm: Communicator, longest: Mapping[torch.dtype, int]):
        """As for ReduceScatters. `longest` must cover all that will be summed, and the messages need tags."""
        super().__init__(comm, longest)
        self._late_tag = comm.take_tags(1)
        columns = min(longest.get(torch.float32, 0), SEGMENT_BYTES // torch.float32.itemsize)
        self._unpacked = torch.empty(comm.world_size - 1, columns, device=comm.device)

    def land(self, like: torch.Tensor, longest: int, own: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        if not is_packable(like.dtype):
            return super().land(like, longest, own)
        rows, columns = self._unpacked.shape
        scratch = self.take_scratch(like.new_empty(0, dtype=torch.uint8), 2 * rows, row_bytes(columns))
        return [row[: travelling_bytes(own)] for row in scratch[:rows]], scratch

    def sent(self, pieces: Places, scratch: torch.Tensor) -> Places:
        if not _is_for_packed(scratch):
            return pieces
        return [(pack(piece, row), other) for row, piece, other in self._rooms(scratch, pieces)]

    def terms(self, segment: Segment) -> list[torch.Tensor]:
        if not _is_for_packed(segment.scratch):
            return segment.landings
        own = len(segment.own)
        terms, late = [row[:own] for row in self._unpacked], []
        for other, term, landing in zip(sorted(self._comm.others), terms, segment.landings, strict=True):
            if has_no_room(landing, own):
                late.append((term, other))
            else:
                unpack(landing, term)
        rooms = self._rooms(segment.scratch, segment.pieces)
        sends = [(piece, other) for row, piece, other in rooms if has_no_room(row, len(piece))]
        if sends or late:
            segment.call.start(sends, late, self._late_tag).wait()
        return terms

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self._unpacked]

    def _rooms(self, scratch: torch.Tensor, pieces: Places) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Each piece with its packed row and its receiving rank."""
        rows = scratch[self._comm.world_size - 1 :]
        return ((row, piece, other) for row, (piece, other) in zip(rows, pieces, strict=False))


def sent_bytes(elements: int, longest: int) -> int:
    """The bytes sent for a part of `elements` elements of a float32 tensor whose longest part has `longest`."""
    count = segment_count(longest, torch.float32.itemsize)
    return sum(
        travelling_bytes(elements // count + (k < elements % count)) for k in range(count)
    )  # split as by tensor_split


def row_bytes(elements: int) -> int:
    """The bytes of scratch for one packed piece of at most `elements` elements."""
    return -(-travelling_bytes(elements) // ALIGNMENT) * ALIGNMENT


def _is_for_packed(scratch: torch.Tensor) -> bool:
    return scratch.dtype == torch.uint8


def is_packable(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype can be packed on this machine."""
    return dtype == torch.float32 and sys.byteorder == "little"


def travelling_bytes(elements: int) -> int:
    """The bytes that are sent for `elements` numbers."""
    return min(_packed_bytes(elements), 4 * elements)


def pack(numbers: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Pack float32 `numbers`, (elements,), into the first bytes of `room`, and return these bytes. `room` has at least
    travelling_bytes(elements) bytes. If there are few numbers, they are copied unpacked.

    1. For each number: its lower 16 bits, and a byte with its sign and the other seven bits of its mantissa.
    2. For each block the largest exponent. For each number, in four bits, how far its exponent is below that, up to 13.
    3. The exponents that are further below, in order, with room for a few; a count says how many.
    If they do not fit, the count is NO_ROOM and nothing else is packed (`has_no_room`).
    """
    elements = len(numbers)
    packed = room[: travelling_bytes(elements)]
    if not _is_shorter(elements):
        return packed.copy_(numbers.view(torch.uint8))
    head, lower, middle, pairs, largest, own = _parts(packed, elements)
    halves = numbers.view(torch.int16).view(-1, 2)
    upper = halves[:, 1].contiguous()
    exponents = packed.new_zeros(len(largest) * BLOCK)
    exponents[:elements] = upper >> 7  # the cast cuts the sign off
    blocks = exponents.view(-1, BLOCK)
    torch.amax(blocks, dim=1, out=largest)
    codes = (largest[:, None] - blocks).flatten().clamp_(max=OWN).masked_fill_(exponents == 0, ZERO)
    far = exponents[codes == OWN]
    if len(far) > len(own):
        head.fill_(NO_ROOM)
        return packed
    head.fill_(len(far))
    own[: len(far)] = far
    lower.copy_(halves[:, 0])
    middle.copy_(upper & 0x7F | upper >> 8 & 0x80)
    two = codes.view(torch.int16)
    pairs.copy_(two | two >> 4)  # the cast cuts the upper bits off
    return packed


def has_no_room(packed: torch.Tensor, elements: int) -> bool:
    """Whether `elements` numbers did not fit when they were packed, so they have to follow unpacked."""
    return _is_shorter(elements) and packed[:HEAD_BYTES].view(torch.int64).item() == NO_ROOM


def unpack(packed: torch.Tensor, numbers: torch.Tensor) -> None:
    """Unpack into the float32 `numbers`, (elements,)."""
    elements = len(numbers)
    if not _is_shorter(elements):
        numbers.view(torch.uint8).copy_(packed)
        return
    head, lower, middle, pairs, largest, own = _parts(packed, elements)
    two = pairs.short()
    codes = (two | two << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    exponents = (largest[:, None] - codes.view(-1, BLOCK)).flatten().masked_fill_(codes == ZERO, 0)
    if count := int(head):
        exponents[codes == OWN] = own[:count]
    signed = middle.short()
    halves = numbers.view(torch.int16).view(-1, 2)
    halves[:, 0] = lower
    halves[:, 1] = signed & 0x7F | (signed & 0x80) << 8 | exponents[:elements].short() << 7


def _packed_bytes(elements: int) -> int:
    return sum(_sizes(elements))


def _is_shorter(elements: int) -> bool:
    return _packed_bytes(elements) < 4 * elements


def _sizes(elements: int) -> list[int]:
    """The bytes of: count; lower bits; next bits with signs; codes in pairs; largest exponents; far exponents."""
    blocks = -(-elements // BLOCK)
    return [HEAD_BYTES, 2 * elements, elements, blocks * BLOCK // 2, blocks, LEAST_ROOM + elements // FAR]


def _parts(packed: torch.Tensor, elements: int) -> tuple[torch.Tensor, ...]:
    head, lower, *rest = packed.split(_sizes(elements))
    return head.view(torch.int64), lower.view(torch.int16), *rest
