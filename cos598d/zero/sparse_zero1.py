"""ZeRO stage 1 between hosts: of large embeddings only the looked-up rows of gradients are sent, and no weights."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.base import Named
from cos598d.sync.buckets import plan_buckets
from cos598d.zero.rows import Table, make_sparse, row_embeddings
from cos598d.zero.unit import Unit
from cos598d.zero.zero1 import Zero1

MOST_MB = 3.6  # of a bucket: MiniLM's layers have three each, so the first is sent while the rest is computed


class SparseZero1(Zero1):
    """`zero1` with replicated large embeddings, of whose gradients only rows are sent.

    1. An embedding of at least half a MiB that is only looked up has a sparse gradient: backward computes the rows of
       the batch's ids. All other parameters are in units as in `zero1`, of at most 3.6 MiB.
    2. When the ranks agree on used parameters at backward's end, they also learn how many rows each has. Then every
       rank sends its rows to every other, and adds up all in order of rank: all have the same sum.
    3. Every rank steps the whole embedding, while rank r steps part r of the units. Rows that nobody looked up have a
       gradient of zeros, and move by momentum and weight decay. All ranks compute the same values, so no embedding's
       weights are sent.

    Cost for weights of S bytes in B units and E more in T embeddings, of which this rank looked up u bytes: 2B + T
    calls. Every rank sends 2(n-1)/n S, and at most (n-1)(1 + 8/width) u; `zero1` sends 2(n-1)/n (S + E). Memory: as
    `zero1` for S, and E of weights, E of gradients and, with AdamW, 2E of state. Every rank steps E, where `zero1`
    steps E/n. Choose it between hosts, with gather_in_forward (DeAR, Zhang et al., arXiv 2302.12445): the slower the
    links, the more it saves.
    """

    def attach(self, model: nn.Module) -> Callable:
        for name, p in model.named_parameters():
            if p.device.type != "cpu":
                raise UserError(f"sparse_zero1 sends rows between CPUs, and {name} is on {p.device}. Choose zero1.")
        self._embeddings = row_embeddings(model)
        self._tables: dict[Unit, Table] = {}
        call = super().attach(model)
        self._undo = make_sparse(self._embeddings.values())
        return call

    def plan(self, model: nn.Module) -> list[tuple[str, list[Named]]]:
        dense = [named for named in self.parameters if named[1] not in self._embeddings]
        largest = min(self.options.bucket_mb, MOST_MB)
        groups = plan_buckets(dense, largest, min(self.options.first_bucket_mb, largest))
        tables = [(name, [(name, p)]) for name, p in reversed(self.parameters) if p in self._embeddings]
        return [(f"bucket {k}", group) for k, group in enumerate(groups)] + tables

    def make_unit(self, number: int, name: str, named: Sequence[Named]) -> Unit:
        if named[0][1] in self._embeddings:
            return Unit(number, name, named, rank=0, ranks=1)  # every rank has, and steps, all of it
        return super().make_unit(number, name, named)

    def lay(self, unit: Unit) -> None:
        super().lay(unit)
        if unit.named[0][1] in self._embeddings:
            self._tables[unit] = Table(self, unit)

    def put(self, unit: Unit, place: int, gradient: torch.Tensor | None) -> None:
        if unit in self._tables:
            self._tables[unit].put(gradient)
        else:
            super().put(unit, place, gradient)

    def start_sum(self, unit: Unit) -> None:
        if unit not in self._tables:
            super().start_sum(unit)

    def agree(self, has: list[bool]) -> list[bool]:
        own = [0] * (self.ranks * len(self._tables))
        own[self.rank :: self.ranks] = [table.count for table in self._tables.values()]
        if self.options.find_unused_parameters:
            numbers = self.count([*has, *own])
            has, counts = [number > 0 for number in numbers[: len(has)]], numbers[len(has) :]
        else:
            has, counts = super().agree(has), self.count(own)
        for place, table in enumerate(self._tables.values()):
            table.start(counts[place * self.ranks : (place + 1) * self.ranks])
        return has

    def end_sums(self, wait: bool) -> None:
        super().end_sums(wait)
        if wait:
            self._averages |= {unit: table.end() for unit, table in self._tables.items()}

    def finish(self) -> None:
        super().finish()
        for unit, _, part in self.cut.pieces:
            if unit in self._tables:
                self.cut.note_rows(part, self._tables[unit].rows, unit.named[0][1].shape[1])

    def detach(self) -> None:
        self._undo()
        super().detach()
