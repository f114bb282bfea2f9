"""All-reduce by recursive halving and doubling: as many bytes as the ring, in a logarithmic number of steps."""

import torch

from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.cost import Collective
from cos598d.sync.estimate import Load
from cos598d.sync.flat import Flat
from cos598d.sync.parts.segmented import ByMessages, move


class HalvedAndDoubled(Collective):
    """log2 p halvings and as many doublings among p ranks, the largest power of two; two more steps for the others."""

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        core = largest_power_of_two(ranks)
        if rank >= core:
            return payload, payload
        size, distance = payload // element_bytes, core // 2
        moved = size if rank + core < ranks else 0
        while distance:
            moved += size  # one half out and the other in, then the same in doubling
            size = size // 2 if rank & distance else size - size // 2
            distance //= 2
        return moved * element_bytes, moved * element_bytes

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        payload *= factor
        core = largest_power_of_two(ranks)
        folded = 2 * payload if core < ranks else 0.0
        moved = 2 * (core - 1) / core * payload
        steps = 2 * (core.bit_length() - 1) + (2 if core < ranks else 0)
        # Two ranks that begin an exchange at once each wait for the other's ready message.
        return Load(steps, moved + folded, 4 * (ranks - 1) / ranks * payload, 2 * moved + folded, waits=steps)


class HalvingDoubling(ByMessages, Flat):
    """Averaging by halving and doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
    Operations in MPICH", IJHPCA 2005, section 4.4).

    After backward every rank copies its gradients into one buffer (one for each dtype), divided by n. Let p be the
    largest power of two that is not above n.
    1. Fold: each of the n-p ranks p+i sends its buffer to rank i, which adds it. Rank p+i then waits until step 4.
    2. Halving: rank r and rank r XOR p/2 each send the other one half of the buffer, and add what arrives to the half
       they keep. Then r and r XOR p/4 halve that half, and so on down to neighbours. Each rank ends with the whole sum
       of one p-th.
    3. Doubling: the same partners in reverse order exchange their finished parts, twice as much each time.
    4. Unfold: rank i sends the result to rank p+i.
    5. Each .grad becomes a view of its place in the buffer.

    Cost for a gradient of S bytes: 1 call. If n is a power of two, 2 log2(n) steps in which every rank sends and
    receives 2(n-1)/n S, as in a ring. Otherwise two steps more: 2(p-1)/p S + S for ranks i with a folded rank p+i,
    2(p-1)/p S for those without, S for the folded ranks. To be exact, each level costs the size of what it halves, and
    the first half of an odd number is one element larger. Choose it for small gradients on many ranks, where steps cost
    more than bytes.
    """

    op = "halving_doubling"
    collective = HalvedAndDoubled()

    def sum_over_ranks(self, call: PointToPointCollective, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        halving_doubling_all_reduce(call, buffer, self.comm.world_size, self.comm.rank, scratch)


def largest_power_of_two(ranks: int) -> int:
    """The largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def halving_doubling_all_reduce(
    call: PointToPointCollective, buffer: torch.Tensor, ranks: int, me: int, scratch: torch.Tensor
) -> None:
    """Put the sum over ranks 0 to `ranks`-1 into `buffer`, (elements,), on each; scratch: see `make_scratch`."""
    core = largest_power_of_two(ranks)
    if me >= core:
        move(call, scratch, outgoing=(buffer, me - core))
        move(call, scratch, incoming=(buffer, me - core))
        return
    guest = me + core if me + core < ranks else None
    if guest is not None:
        move(call, scratch, incoming=(buffer, guest), adds=True)
    levels = []
    kept, distance = buffer, core // 2
    while distance:
        partner = me ^ distance
        lower, upper = kept.tensor_split(2)
        mine, theirs = (upper, lower) if me & distance else (lower, upper)
        move(call, scratch, outgoing=(theirs, partner), incoming=(mine, partner), adds=True)
        levels.append((partner, mine, theirs))
        kept, distance = mine, distance // 2
    for partner, mine, theirs in reversed(levels):
        move(call, scratch, outgoing=(mine, partner), incoming=(theirs, partner))
    if guest is not None:
        move(call, scratch, outgoing=(buffer, guest))
