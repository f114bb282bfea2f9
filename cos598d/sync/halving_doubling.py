"""All-reduce by recursive halving and doubling: as many bytes as the ring, in a logarithmic number of steps."""

import torch
import torch.distributed as dist

from cos598d.sync.flat import Flat
from cos598d.sync.messages import in_reach, swap


class HalvingDoubling(Flat):
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

    Cost for a gradient of S bytes: 1 call. If n is a power of two, 2 log2(n) steps in which every rank sends and
    receives 2(n-1)/n S, as in a ring. Otherwise two steps more: 2(p-1)/p S + S for ranks i with a folded rank p+i,
    2(p-1)/p S for those without, S for the folded ranks. Choose it for small gradients on many ranks, where steps cost
    more than bytes.
    """

    def sum_up(self, buffer: torch.Tensor, name: str) -> None:
        power = 1 << (self.ranks.bit_length() - 1)
        with in_reach(self, buffer) as near, self.ledger.composing("halving_doubling_all_reduce", buffer, name):
            if self.rank >= power:
                dist.send(near, self.peer(self.rank - power), group=self.group)
                dist.recv(near, self.peer(self.rank - power), group=self.group)
                return
            folded = self.rank + power if self.rank + power < self.ranks else None
            if folded is not None:
                landing = torch.empty_like(near)
                dist.recv(landing, self.peer(folded), group=self.group)
                near += landing
            self._halve(near, power // 2)
            if folded is not None:
                dist.send(near, self.peer(folded), group=self.group)

    def _halve(self, buffer: torch.Tensor, distance: int) -> None:
        """Sum over the ranks that differ from this one in the bits of `distance` and below."""
        if not distance:
            return
        partner, halves = self.rank ^ distance, buffer.tensor_split(2)
        mine, theirs = halves[bool(self.rank & distance)], halves[not self.rank & distance]
        landing = torch.empty_like(mine)
        swap(self, theirs, partner, landing, partner)
        mine += landing
        self._halve(mine, distance // 2)
        swap(self, mine, partner, theirs, partner)
