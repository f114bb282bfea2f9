"""A ring all-reduce made of messages between neighbours: what the library does inside its all_reduce."""

import torch

from cos598d.sync.flat import Flat
from cos598d.sync.messages import in_reach, swap


class Ring(Flat):
    """Averaging in a ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009).

    After backward every rank copies its gradients into one buffer (one for each dtype), divided by n, and splits it
    into n parts. Rank r sends only to rank r+1 and receives only from rank r-1, modulo n.
    1. Reduce-scatter: n-1 steps. In step s, rank r sends part r-s and adds what arrives to part r-s-1. After them, rank
       r holds the whole sum of part r+1.
    2. All-gather: n-1 steps. In step s, rank r sends part r+1-s, which is finished, and receives part r-s.

    Cost for a gradient of S bytes: 1 call of 2(n-1) steps; every rank sends and receives 2(n-1)/n S. To be exact, parts
    differ by one element if n does not divide S. No all-reduce can use fewer bytes per rank, but the steps grow with n.
    Choose it to see how all-reduce is made; `flat` is the same algorithm inside the library.
    """

    def sum_up(self, buffer: torch.Tensor, name: str) -> None:
        n, r = self.ranks, self.rank
        with in_reach(self, buffer) as near, self.ledger.composing("ring_all_reduce", buffer, name):
            parts = near.tensor_split(n)
            landing = torch.empty_like(parts[0])
            for step in range(2 * (n - 1)):
                outgoing, incoming = parts[(r - step) % n], parts[(r - step - 1) % n]
                is_adding = step < n - 1
                arriving = landing[: len(incoming)] if is_adding else incoming
                swap(self, outgoing, (r + 1) % n, arriving, (r - 1) % n)
                if is_adding:
                    incoming += arriving
