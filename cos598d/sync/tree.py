"""All-reduce up and down a binomial tree: the fewest steps, but whole buffers on every link."""

import torch

from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.cost import Collective
from cos598d.sync.estimate import Load
from cos598d.sync.flat import Flat
from cos598d.sync.parts.segmented import ByMessages, move


class BinomialTree(Collective):
    """Up a binomial tree and down again, the whole payload on every level."""

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        parent, children = relatives(rank, ranks)
        moved = (len(children) + (parent is not None)) * payload
        return moved, moved

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        payload *= factor
        passed = 2 * (ranks - 1).bit_length()
        # On the way up, parents send ready messages; on the way down, children have sent theirs long before.
        return Load(passed, passed * payload, 4 * (ranks - 1) / ranks * payload, passed * payload, waits=passed // 2)


class Tree(ByMessages, Flat):
    """Averaging up and down a binomial tree with rank 0 at its root.

    The parent of rank r is r minus its lowest set bit: 1, 2 and 4 are under 0, 3 under 2, 5 and 6 under 4, 7 under
    6. After backward every rank copies its gradients into one buffer (one for each dtype), divided by n. Then:
    1. Up: a rank receives the buffers of its children, smallest subtree first, adds each to its own, and sends the sum
       to its parent. Rank 0 holds the whole sum.
    2. Down: a rank receives the sum from its parent and sends it to its children, largest subtree first.
    3. Each .grad becomes a view of its place in the buffer.

    Cost for a gradient of S bytes: 1 call of 2 ceil(log2 n) steps, each with the whole of S. A rank with c children
    sends and receives c S, and S more unless it is rank 0: between S for a leaf and ceil(log2 n) S for rank 0. Choose
    it for gradients so small that only steps count; for larger ones it leaves most links idle.
    """

    op = "tree"
    collective = BinomialTree()

    def sum_over_ranks(self, call: PointToPointCollective, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        tree_all_reduce(call, buffer, self.comm.world_size, self.comm.rank, scratch)


def relatives(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """The parent of `rank` in the binomial tree (None for 0), and its children, smallest subtree first."""
    children, bit = [], 1
    while bit < ranks and not rank & bit:
        if rank + bit < ranks:
            children.append(rank + bit)
        bit *= 2
    return rank - bit if rank else None, children


def tree_all_reduce(
    call: PointToPointCollective, buffer: torch.Tensor, ranks: int, me: int, scratch: torch.Tensor
) -> None:
    """Put the sum over ranks 0 to `ranks`-1 into `buffer`, (elements,), on each; scratch: see `make_scratch`."""
    parent, children = relatives(me, ranks)
    for child in children:
        move(call, scratch, incoming=(buffer, child), adds=True)
    if parent is not None:
        move(call, scratch, outgoing=(buffer, parent))
        move(call, scratch, incoming=(buffer, parent))
    for child in reversed(children):
        move(call, scratch, outgoing=(buffer, child))
