"""ZeRO stage 1 between hosts: of large embeddings only the looked-up rows of gradients are sent, and no weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import GRADIENTS
from cos598d.sync.base import Named
from cos598d.sync.buckets import plan_buckets
from cos598d.sync.sparse_rows import large_embeddings
from cos598d.zero.rows import Table
from cos598d.zero.unit import Unit
from cos598d.zero.zero1 import Zero1

LEAST_BYTES = 512 << 10  # of an embedding: a smaller one would save too little


class SparseZero1(Zero1):
    """`zero1` with replicated large embeddings, of whose gradients only rows are sent.

    1. An embedding of at least half a MiB that is only looked up has a sparse gradient: backward computes the rows of
       the batch's ids. All other parameters are in units as in `zero1`, of at most 3.6 MiB.
    2. At backward's end the ranks learn how many rows each has, when they agree on which parameters are used. Then they
       gather all rows, padded to the most that a rank has. Every rank adds them up in order of rank, so all have the
       same sum.
    3. Every rank steps the whole embedding, while rank r steps part r of the units. Rows that nobody looked up have a
       gradient of zeros, and move by momentum and weight decay. All ranks compute the same values, so no embedding's
       weights are sent.

    Cost for weights of S bytes in B units and E more in T embeddings, of which a rank looked up at most u bytes:
    2B + T + 1 calls. Every rank sends 2(n-1)/n S, and (n-1)(1 + 8/width) u; `zero1` sends 2(n-1)/n (S + E). Memory: as
    `zero1` for S, and E of weights, E of gradients and, with AdamW, 2E of state. Every rank steps E, where `zero1`
    steps E/n. Choose it between hosts, with gather_in_forward (DeAR, Zhang et al., arXiv 2302.12445): the slower the
    links, the more it saves.
    """

    most_mb = 3.6  # of a bucket: MiniLM's layers have three each, so the first is sent while the rest is computed
    cuts_tables = False  # every rank has, and steps, whole embeddings

    def attach(self, model: nn.Module) -> Callable:
        for name, p in model.named_parameters():
            if p.device.type != "cpu":
                raise UserError(
                    f"{type(self).__name__} needs tensors on CPUs, and {name} is on {p.device}. Choose zero1."
                )
        large = {p for p in large_embeddings(model, LEAST_BYTES) if p.is_contiguous()}
        embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding) and not one.scale_grad_by_freq]
        self._embeddings = {one.weight: (one, one.sparse) for one in embeddings if one.weight in large}
        for embedding, _ in self._embeddings.values():
            embedding.sparse = True  # backward computes only the rows of the batch
        return super().attach(model)

    def plan(self, parameters: Sequence[Named]) -> list[list[Named]]:
        tables = [[named] for named in reversed(parameters) if named[1] in self._embeddings]
        dense = [named for named in parameters if named[1] not in self._embeddings]
        most = min(self.options.bucket_mb, self.most_mb)
        return plan_buckets(dense, most, self.options.first_bucket_mb) + tables

    def make_bucket(self, name: str, group: Sequence[Named]) -> Any:
        weight = group[0][1]
        if weight not in self._embeddings:
            return super().make_bucket(name, group)
        rank, ranks = (self.rank, self.ranks) if self.cuts_tables else (0, 1)
        return Table(name, group, rank, ranks, align=weight.shape[1])  # cut between rows

    def start_parts(self, unit: Unit) -> Any:
        return None if isinstance(unit, Table) else super().start_parts(unit)

    def agree(self, has: list[bool]) -> list[bool]:
        tables = [unit for unit in self.buckets if isinstance(unit, Table)]
        own = [len(unit.rows[0]) * (rank == self.rank) for unit in tables for rank in range(self.ranks)]
        counts = iter(self.count([*has, *own]))
        users = [next(counts) > 0 for _ in has]
        for unit in tables:
            self._start_to_gather(unit, max(next(counts) for _ in range(self.ranks)))
        return users

    def _start_to_gather(self, unit: Table, most: int) -> None:
        """Start to gather all ranks' rows, of which each has at most so many: numbers and values together, as bytes."""
        numbers, values = unit.rows
        lacking, end = most - len(numbers), most * numbers.element_size()
        all_numbers = nn.functional.pad(numbers, (0, lacking), value=-1)
        all_values = nn.functional.pad(values, (0, 0, 0, lacking)).flatten()
        own = torch.cat([all_numbers.view(torch.uint8), all_values.view(torch.uint8)])
        every = [torch.empty_like(own) for _ in range(self.ranks)]
        with self.ledger.naming(unit.name, GRADIENTS):
            unit.call = dist.all_gather(every, own, group=self.group, async_op=True)
        unit.every = [
            (each[:end].view(numbers.dtype), each[end:].view(values.dtype).view(-1, values.shape[1])) for each in every
        ]

    def average_part(self, unit: Unit) -> torch.Tensor:
        return unit.average_rows(self.ranks) if isinstance(unit, Table) else super().average_part(unit)

    def detach(self) -> None:
        for embedding, was_sparse in self._embeddings.values():
            embedding.sparse = was_sparse
        super().detach()
