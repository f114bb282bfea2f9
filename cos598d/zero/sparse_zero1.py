"""ZeRO stage 1 between hosts: of large embeddings only the looked-up rows of gradients are sent, and no weights."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.records.conventions import AGREEMENT, GRADIENTS
from cos598d.sync.base import Named
from cos598d.zero.rows import Table, ZeroOfRows
from cos598d.zero.unit import Unit


class SparseZero1(ZeroOfRows):
    """`zero1` with replicated large embeddings, of whose gradients only rows are sent.

    1. An embedding of at least half a MiB that is only looked up has a sparse gradient: backward computes the rows of
       the batch's ids. All other parameters are in units as in `zero1`, of at most 3.6 MiB.
    2. At backward's end the ranks learn how many rows each has, and gather all of them, padded to the most that a rank
       has. Every rank adds them up in order of rank: all have the same sum.
    3. Every rank steps the whole embedding, while rank r steps part r of the units. Rows that nobody looked up have a
       gradient of zeros, and move by momentum and weight decay. All ranks compute the same values, so no embedding's
       weights are sent.

    Cost for weights of S bytes in B units and E more in T embeddings, of which a rank looked up at most u bytes:
    2B + 3T calls. Every rank sends 2(n-1)/n S, and (n-1)(1 + 8/width) u; `zero1` sends 2(n-1)/n (S + E). Memory: as
    `zero1` for S, and E of weights, E of gradients and, with AdamW, 2E of state. Every rank steps E, where `zero1`
    steps E/n. Choose it between hosts, with gather_in_forward (DeAR, Zhang et al., arXiv 2302.12445): the slower the
    links, the more it saves.
    """

    most_mb = 3.6  # MiniLM's layers have three units each, so the first is sent while the rest is computed

    def make_table(self, name: str, group: Sequence[Named]) -> Table:
        return Table(name, group, rank=0, ranks=1)  # every rank has, and steps, all of it

    def start_parts(self, unit: Unit) -> Any:
        if not isinstance(unit, Table):
            return super().start_parts(unit)
        numbers, values = unit.rows
        lengths = self._gathered(torch.tensor(len(numbers)), f"rows of {unit.name}", AGREEMENT)
        lacking = int(max(lengths)) - len(numbers)
        numbers_of = self._gathered(nn.functional.pad(numbers, (0, lacking)), unit.name)
        values_of = self._gathered(nn.functional.pad(values, (0, 0, 0, lacking)), unit.name)
        every = zip(numbers_of, values_of, lengths, strict=True)
        unit.average = unit.average_of([(each[:count], its[:count]) for each, its, count in every], self.ranks)
        return None  # nothing is under way

    def _gathered(self, tensor: torch.Tensor, name: str, purpose: str = GRADIENTS) -> list[torch.Tensor]:
        """Every rank's tensor, all of one shape."""
        every = [torch.empty_like(tensor) for _ in range(self.ranks)]
        with self.ledger.naming(name, purpose):
            dist.all_gather(every, tensor, group=self.group)
        return every
