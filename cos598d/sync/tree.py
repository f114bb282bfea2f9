"""All-reduce up and down a binomial tree: the fewest steps, but whole buffers on every link."""

import torch
import torch.distributed as dist

from cos598d.sync.flat import Flat
from cos598d.sync.messages import in_reach


class Tree(Flat):
    """Averaging up and down a binomial tree with rank 0 at its root.

    The parent of rank r is r minus its lowest set bit: 1, 2 and 4 are under 0, 3 under 2, 5 and 6 under 4, 7 under
    6. After backward every rank copies its gradients into one buffer (one for each dtype), divided by n. Then:
    1. Up: a rank receives the buffers of its children, smallest subtree first, adds each to its own, and sends the sum
       to its parent. Rank 0 holds the whole sum.
    2. Down: a rank receives the sum from its parent and sends it to its children, largest subtree first.

    Cost for a gradient of S bytes: 1 call of 2 ceil(log2 n) steps, each with the whole of S. A rank with c children
    sends and receives c S, and S more unless it is rank 0: between S for a leaf and ceil(log2 n) S for rank 0. Choose
    it for gradients so small that only steps count; for larger ones it leaves most links idle.
    """

    def sum_up(self, buffer: torch.Tensor, name: str) -> None:
        parent, children = relatives(self.rank, self.ranks)
        with in_reach(self, buffer) as near, self.ledger.composing("tree_all_reduce", buffer, name):
            landing = torch.empty_like(near)
            for child in children:
                dist.recv(landing, self.peer(child), group=self.group)
                near += landing
            if parent is not None:
                dist.send(near, self.peer(parent), group=self.group)
                dist.recv(near, self.peer(parent), group=self.group)
            for child in reversed(children):
                dist.send(near, self.peer(child), group=self.group)


def relatives(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """The parent of `rank` in the binomial tree (None for 0), and its children, smallest subtree first."""
    children, bit = [], 1
    while bit < ranks and not rank & bit:
        if rank + bit < ranks:
            children.append(rank + bit)
        bit *= 2
    return rank - bit if rank else None, children
