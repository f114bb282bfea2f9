"""One reduce to rank 0 and one broadcast for each gradient: the sum is computed on the way."""

import torch

from cos598d.comm.gloo import reduce_bytes, ring_segments
from cos598d.sync.base import GradientSync
from cos598d.sync.cost import Collective, CollectiveCall, Step
from cos598d.sync.estimate import Load


class Reduce(Collective):
    """A ring reduce-scatter whose parts go to rank 0, which reports that it is ready for them when its ring has ended.

    gloo's ring leaves out only the last two segments of a part, so almost all of the payload goes around.
    """

    op = "reduce"

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        payload *= factor
        sent, received = reduce_bytes(round(payload), ranks, 0, True)
        mean = 2 * ((ranks - 1) / ranks * payload) * (1 + 1 / ranks)
        segments = ranks * ring_segments(payload, ranks) - 2
        return Load(ranks - 1, received, mean, sent + received, segments, waits=2)


class Broadcast(Collective):
    """A binomial tree from rank 0, which has ceil(log2 n) children; its eldest child has one fewer, and so on.

    A rank with the payload sends it whole to all of its children at once, over one link. So L payloads pass rank 0's
    link, then L-1 its eldest child's, down to 1.
    """

    op = "broadcast"

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        payload *= factor
        levels = (ranks - 1).bit_length()
        return Load(levels, levels * (levels + 1) / 2 * payload, 2 * ((ranks - 1) / ranks * payload), levels * payload)


class ReduceBroadcast(GradientSync):
    """Averaging by reduce and broadcast, tensor by tensor, after backward.

    For each gradient, in the order of the model's parameters:
    1. Reduce: the ranks add up n-th parts of it in a ring (reduce-scatter), and each sends its finished part to rank 0.
    2. Rank 0 divides the sum by n.
    3. Broadcast: rank 0 sends the average down a binomial tree, in which ranks that have it pass it on.

    Cost for P gradients of S bytes in all: 2P calls. Rank 0 receives 2(n-1)/n S and sends (n-1)/n S + ceil(log2 n) S.
    Every other rank receives (n-1)/n S + S and sends S, and S more for each child it has in the tree. (For a tensor of
    more than 2n MiB, gloo's reduce sends more than that, see `comm/gloo.py`.) Rank 0's link carries less than in
    `gather_scatter`, where it receives and sends (n-1) S. Rank 0 holds no copies. But the second half cannot start
    before the first has ended. Choose it to see the step from gather and scatter to all-reduce, which leaves the sum
    spread over the ranks until every rank has it.
    """

    keeps_nothing = True

    def average(self, name: str, gradient: torch.Tensor) -> None:
        self.comm.reduce(gradient, name)
        if self.comm.rank == 0:
            gradient /= self.comm.world_size
        self.comm.broadcast(gradient, name)

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        return [
            CollectiveCall(collective, [tensor]) for tensor in step.tensors for collective in (Reduce(), Broadcast())
        ]
