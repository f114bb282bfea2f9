"""Reduce-scatters whose pieces travel in fewer bits, and give the same sums to the last bit."""

from collections.abc import Iterator, Mapping

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import SEGMENT_BYTES, ReduceScatters, Segment, segment_count
from cos598d.comm.messages import Places
from cos598d.strategies.parts.short_exponents import has_no_room, is_packable, pack, travelling_bytes, unpack

ALIGNMENT = 8  # bytes, at whose multiples a packed piece begins


class PackedReduceScatters(ReduceScatters):
    """As ReduceScatters, but pieces of float32 tensors are packed while they travel (`short_exponents`).

    1. A piece is packed in scratch, and sent from there.
    2. When all of a segment has come it is unpacked, and added up in order of rank as ever.
    3. Where a piece had no room in its packed form, that says so, and the piece follows as it is: from its sender to
       its receiver alone, in the order in which segments end.
    Scratch is what is received and what is sent of up to `IN_FLIGHT` segments, packed, and of one what is unpacked.
    """

    def __init__(self, comm: Communicator, longest: Mapping[torch.dtype, int]):
        """As for ReduceScatters, but all that will be summed is known; the messages must have tags."""
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
            segment.call.start(sends, late, self._late_tag, among_all=False).wait()
        return terms

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self._unpacked]

    def _rooms(self, scratch: torch.Tensor, pieces: Places) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Where each piece is packed, the piece, and who gets it."""
        rows = scratch[self._comm.world_size - 1 :]
        return ((row, piece, other) for row, (piece, other) in zip(rows, pieces, strict=False))


def sent_bytes(elements: int, longest: int) -> int:
    """What travels of a part of so many elements of a float32 tensor whose longest part has `longest`."""
    count = segment_count(longest, torch.float32.itemsize)
    return sum(
        travelling_bytes(elements // count + (k < elements % count)) for k in range(count)
    )  # as tensor_split cuts


def row_bytes(elements: int) -> int:
    """The scratch for one packed piece of so many elements at most."""
    return -(-travelling_bytes(elements) // ALIGNMENT) * ALIGNMENT


def _is_for_packed(scratch: torch.Tensor) -> bool:
    return scratch.dtype == torch.uint8
