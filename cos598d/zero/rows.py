"""Zero1 with large embeddings, of whose gradients only the rows that were looked up are computed and handled."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.base import Named
from cos598d.sync.buckets import plan_buckets
from cos598d.sync.sparse_rows import large_embeddings
from cos598d.zero.unit import Piece, Unit
from cos598d.zero.zero1 import Zero1

LEAST_BYTES = 512 << 10  # of an embedding: a smaller one would save too little

Rows = tuple[torch.Tensor, torch.Tensor]  # their numbers, (u,), each once, and their values, (u, width)


class Table(Unit):
    """An embedding as a unit. rows: of this rank's gradient, of a backward. All of them, if it is dense.
    every: those of each rank, when they are here. The number is -1 where there is no row.
    """

    rows: Rows
    every: list[Rows]

    def put(self, piece: Piece, gradient: torch.Tensor | None) -> None:
        weight = piece.parameter
        if gradient is None:
            self.rows = torch.empty(0, dtype=torch.int64), weight.new_empty(0, weight.shape[1])
        elif gradient.layout == torch.strided:
            self.rows = torch.arange(len(weight)), gradient
        else:
            together = gradient.coalesce()
            self.rows = together.indices()[0], together.values()

    def average_rows(self, ranks: int) -> torch.Tensor:
        """The average of all ranks' rows in this rank's part, (length,): zeros where nobody has a row."""
        ((_, weight),) = self.named
        average = weight.new_zeros(self.length // weight.shape[1], weight.shape[1])
        first = self.rank * len(average)
        for numbers, values in self.every:
            mine = ((numbers >= first) & (numbers < first + len(average))).nonzero().flatten()
            average.index_add_(0, numbers[mine] - first, values[mine], alpha=1 / ranks)
        return average.view(-1)


class ZeroOfRows(Zero1):
    """A large embedding that is only looked up is a unit by itself, and its gradient is sparse."""

    most_mb = math.inf  # of a bucket
    cuts_tables = True  # else every rank has, and steps, the whole embedding

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
        return plan_buckets(dense, most, min(self.options.first_bucket_mb, most)) + tables

    def make_bucket(self, name: str, group: Sequence[Named]) -> Any:
        weight = group[0][1]
        if weight not in self._embeddings:
            return super().make_bucket(name, group)
        rank, ranks = (self.rank, self.ranks) if self.cuts_tables else (0, 1)
        return Table(name, group, rank, ranks, align=weight.shape[1])  # cut between rows

    def detach(self) -> None:
        for embedding, was_sparse in self._embeddings.values():
            embedding.sparse = was_sparse
        super().detach()
