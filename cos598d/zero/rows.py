"""Gradients of embeddings by rows: only those that were looked up are computed and handled."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.sync.base import GradientSync
from cos598d.sync.sparse_rows import large_embeddings
from cos598d.zero.unit import Unit

LEAST_BYTES = 512 << 10  # of an embedding: a smaller one would save too little


def row_embeddings(model: nn.Module) -> dict[nn.Parameter, nn.Embedding]:
    """The weights, large enough, that one embedding has and only looks up.

    Excluded are scale_grad_by_freq, whose gradient torch computes whole, and weights with hooks of the script's, which
    expect a whole gradient.
    """
    module_of = {module.weight: module for module in model.modules() if isinstance(module, nn.Embedding)}
    large = [(p, module_of[p]) for p in large_embeddings(model, LEAST_BYTES)]
    hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
    return {
        p: module
        for p, module in large
        if p.is_contiguous() and not module.scale_grad_by_freq and not any(getattr(p, kind, None) for kind in hooks)
    }


def make_sparse(embeddings: Iterable[nn.Embedding]) -> Callable[[], None]:
    """Make backward compute only the rows that were looked up. Call the result to undo it."""
    were_sparse = {embedding: embedding.sparse for embedding in embeddings}
    for embedding in were_sparse:
        embedding.sparse = True

    def undo() -> None:
        for embedding, was_sparse in were_sparse.items():
            embedding.sparse = was_sparse

    return undo


def rows_of(gradient: torch.Tensor | None, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient's rows: their numbers, (u,), each once, and their values, (u, width). All rows, if it is dense."""
    if gradient is None:
        return torch.empty(0, dtype=torch.int64), weight.new_empty(0, weight.shape[1])
    if gradient.layout == torch.strided:
        return torch.arange(len(weight)), gradient
    together = gradient.coalesce()
    return together.indices()[0], together.values()


class Table:
    """The gradient of an embedding that every rank steps whole: zeros except in the rows that some rank looked up."""

    def __init__(self, sync: GradientSync, unit: Unit):
        ((self._name, self._weight),) = unit.named
        self._sync, self._tag = sync, unit.number
        self.sums = unit.gradient_views[0].zero_()
        self.rows = torch.empty(0, dtype=torch.int64)  # that are not zeros, each maybe several times
        self._terms: list[tuple[torch.Tensor, torch.Tensor]] = []  # by rank: rows and values
        self._calls: list[Any] = []

    def put(self, gradient: torch.Tensor | None) -> None:
        """Take this rank's gradient of a backward."""
        self._own = rows_of(gradient, self._weight)

    @property
    def count(self) -> int:
        """How many rows it has."""
        return len(self._own[0])

    def start(self, counts: Sequence[int]) -> None:
        """Send this rank's rows to all others, and receive theirs, so many from each rank."""
        ids, values = self._own
        with self._sync.ledger.composing("all_gather", values, self._name, ends_later=True) as self._row_ends:
            for rank, count in enumerate(counts):
                term = (
                    (ids, values)
                    if rank == self._sync.rank
                    else (ids.new_empty(count), values.new_empty(count, values.shape[1]))
                )
                self._terms.append(term)
                if rank != self._sync.rank:
                    to = self._sync.peer(rank), self._sync.group, self._tag
                    self._calls += [dist.irecv(part, *to) for part in term if count]
                    self._calls += [dist.isend(part, *to) for part in self._own if len(ids)]

    def end(self) -> torch.Tensor:
        """Wait for the rows, and return the average over the ranks, (elements,)."""
        for call in self._calls:
            call.wait()
        self._row_ends()
        self.sums[self.rows] = 0
        for ids, values in self._terms:
            self.sums.index_add_(0, ids, values, alpha=1 / self._sync.ranks)
        self.rows = torch.cat([ids for ids, _ in self._terms]).unique()
        self._terms, self._calls = [], []
        return self.sums.view(-1)


class SharedTable:
    """A large embedding's gradients in every rank's segment, (rows, width): zeros except in marked rows.

    A rank marks the rows to which it has added. Other ranks read its marks, as its rows, only in their own part.
    """

    def __init__(self, unit: Unit, segments: Sequence[torch.Tensor], marks: Sequence[torch.Tensor]):
        """`segments` and `marks`: every rank's, in order of rank."""
        views = [flat.view(-1, unit.align) for flat in segments]
        count = unit.length // unit.align
        self._first = unit.rank * count
        mine = [marked[self._first : self._first + count] for marked in marks]
        self._weight = unit.named[0][1]
        self._own, self._marks, self._mine = views[unit.rank], marks[unit.rank], mine[unit.rank]
        self._others = [pair for rank, pair in enumerate(zip(views, mine, strict=True)) if rank != unit.rank]
        self._ranks = unit.ranks
        self.summed = torch.empty(0, dtype=torch.int64)  # rows of this rank's part that are not zeros

    def put(self, gradient: torch.Tensor | None) -> None:
        """Take this rank's gradient of a backward, in place of the last one's."""
        self._own[self._marks.nonzero().flatten()] = 0
        self._marks.zero_()
        ids, values = rows_of(gradient, self._weight)
        self._own[ids] = values
        self._marks[ids] = 1

    def add_up(self) -> None:
        """Average this rank's part: the rows that some rank has marked in it, in order of rank from this one on."""
        for theirs, marked in self._others:
            rows = marked.nonzero().flatten() + self._first
            self._own.index_add_(0, rows, theirs[rows])
            self._marks[rows] = 1
        self.summed = self._mine.nonzero().flatten()
        self._own[self.summed + self._first] /= self._ranks
