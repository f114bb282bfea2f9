"""A ring all-reduce made of messages between neighbours: what the library does inside its all_reduce."""

import torch

from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.flat import Flat
from cos598d.sync.parts.ring import RING, ring_all_reduce
from cos598d.sync.parts.segmented import ByMessages


class Ring(ByMessages, Flat):
    """Averaging in a ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009).

    After backward every rank copies its gradients into one buffer (one for each dtype), divided by n, and splits it
    into n parts. Rank r sends only to rank r+1 and receives only from rank r-1, modulo n.
    1. Reduce-scatter: n-1 steps. In step s, rank r sends part r-s and adds what arrives to part r-s-1. After them, rank
       r holds the whole sum of part r+1.
    2. All-gather: n-1 steps. In step s, rank r sends part r+1-s, which is finished, and receives part r-s.
    3. Each .grad becomes a view of its place in the buffer.
    A part is sent in segments: a segment is sent to the next rank as soon as it is added, while others arrive.

    Cost for a gradient of S bytes: 1 call of 2(n-1) steps; every rank sends and receives 2(n-1)/n S. To be exact, parts
    differ by one element if n does not divide S. Rank r sends 2S minus parts r+1 and r+2, and receives 2S minus parts r
    and r+1. No all-reduce can use fewer bytes per rank, but the steps grow with n. Choose it to see how all-reduce is
    made; `flat` is the same algorithm inside the library. `--compress` as for `bucketed`.
    """

    op = "ring"
    collective = RING

    def sum_over_ranks(self, call: PointToPointCollective, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        ring_all_reduce(call, buffer, range(self.comm.world_size), self.comm.rank, scratch)
