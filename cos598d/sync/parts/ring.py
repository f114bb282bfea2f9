"""The ring all-reduce of messages, and its halves: a reduce-scatter and an all-gather."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.cost import Even, both_ways, ring_steps
from cos598d.sync.parts.segmented import Exchange, pipeline, segment_count


class _Ring(Even):
    """Parts that differ by one element where n does not divide the payload."""

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        elements = payload // element_bytes

        def part(number: int) -> int:
            return elements // ranks + (number % ranks < elements % ranks)

        sent = 2 * elements - part(rank + 1) - part(rank + 2)
        received = 2 * elements - part(rank) - part(rank + 1)
        return sent * element_bytes, received * element_bytes


RING = _Ring("all_reduce", ring_steps, both_ways)


def ring_all_reduce(
    call: PointToPointCollective, buffer: torch.Tensor, members: Sequence[int], me: int, scratch: torch.Tensor
) -> None:
    """Put the sum over the ranks `members` into `buffer` of each; every member calls this, others do not.

    buffer: (elements,); members: ranks in the order of the ring, the same on each; me: this rank, one of them;
    scratch: of `segmented.make_scratch`.
    """
    segments = cut_for_ring(buffer, len(members), scratch)
    # A segment is sent one step after it came in, as many exchanges later as a part has segments: it must be there.
    landing = scratch[: len(segments[0])]
    pipeline(call, chain(reduce_scatter(segments, members, me), all_gather(segments, members, me)), landing)


def cut_for_ring(buffer: torch.Tensor, ranks: int, scratch: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """`ranks` parts of the buffer, each in as many segments, of which each fits into a row of `scratch`."""
    parts = buffer.tensor_split(ranks)
    count = segment_count(parts[0], scratch)  # the largest part's, so that all ranks cut all parts alike
    return [part.tensor_split(count) for part in parts]


def reduce_scatter(segments: Sequence[Sequence[torch.Tensor]], members: Sequence[int], me: int) -> Iterator[Exchange]:
    """n-1 steps in which the member at `place` sends part place-s and adds what arrives to part place-s-1.

    After them it holds the whole sum of part place+1. segments: of `cut_for_ring`.
    """
    place = members.index(me)
    for step in range(len(members) - 1):
        yield from _step(segments, members, me, place - step, adds=True)


def all_gather(segments: Sequence[Sequence[torch.Tensor]], members: Sequence[int], me: int) -> Iterator[Exchange]:
    """n-1 steps in which the member at `place`, which holds part place+1, sends part place+1-s and receives place-s."""
    place = members.index(me)
    for step in range(len(members) - 1):
        yield from _step(segments, members, me, place + 1 - step, adds=False)


def _step(
    segments: Sequence[Sequence[torch.Tensor]], members: Sequence[int], me: int, part: int, adds: bool
) -> Iterator[Exchange]:
    """To the right goes `part`, and from the left comes the one before it."""
    n, place = len(members), members.index(me)
    left, right = members[place - 1], members[(place + 1) % n]
    for outgoing, incoming in zip(segments[part % n], segments[(part - 1) % n], strict=True):
        yield Exchange((outgoing, right), (incoming, left), adds)
