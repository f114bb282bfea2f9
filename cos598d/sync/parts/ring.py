"""A ring all-reduce made of point-to-point messages."""

from collections.abc import Sequence

import torch

from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.cost import Even, both_ways, ring_steps
from cos598d.sync.parts.segmented import Exchange, pipeline, segment_count


class _Ring(Even):
    """A ring whose parts differ by one element if n does not divide the payload."""

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
    """Put the sum over the ranks `members` into `buffer` on each. Every member calls this; others do not.

    buffer: (elements,); members: ranks in the order of the ring, the same on each; me: this rank, one of them;
    scratch: of `segmented.make_scratch`.

    In each of 2(n-1) steps the member at `place` sends part place-step to its right and receives part
    place-step-1.
    1. Reduce-scatter: in the first n-1 steps it adds what arrives. It then holds the whole sum of part place+1.
    2. All-gather: in the other steps finished parts arrive, and replace its own.
    """
    n, place = len(members), members.index(me)
    left, right = members[place - 1], members[(place + 1) % n]
    parts = buffer.tensor_split(n)
    count = segment_count(parts[0], scratch)  # the largest part's, so that all ranks split all parts alike
    segments = [part.tensor_split(count) for part in parts]
    exchanges = (
        Exchange((outgoing, right), (incoming, left), adds=step < n - 1)
        for step in range(2 * (n - 1))
        for outgoing, incoming in zip(segments[(place - step) % n], segments[(place - step - 1) % n], strict=True)
    )
    # A segment is sent one step after it arrived, as many exchanges later as a part has segments. It must have arrived.
    pipeline(call, exchanges, scratch[:count])
