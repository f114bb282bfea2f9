"""Zero1 with large embeddings, of whose gradients only the rows that were looked up are computed and handled."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.base import Named
from cos598d.sync.buckets import plan_buckets
from cos598d.sync.sparse_rows import large_embeddings
from cos598d.zero.unit import Unit
from cos598d.zero.zero1 import Zero1

LEAST_BYTES = 512 << 10  # of an embedding: a smaller one would save too little

Rows = tuple[torch.Tensor, torch.Tensor]  # their numbers, (u,), each once, and their values, (u, width)


class ZeroOfRows(Zero1):
    """A large embedding that is only looked up is a unit by itself, and its gradient is sparse."""

    most_mb = float("inf")  # of a bucket

    def attach(self, model: nn.Module) -> Callable:
        for name, p in model.named_parameters():
            if p.device.type != "cpu":
                raise UserError(
                    f"{type(self).__name__} needs tensors on CPUs, and {name} is on {p.device}. Choose zero1."
                )
        large = {p for p in large_embeddings(model, LEAST_BYTES) if p.is_contiguous()}
        embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding) and not one.scale_grad_by_freq]
        self._embeddings = {one.weight: (one, one.sparse) for one in embeddings if one.weight in large}
        self._rows: dict[Unit, Rows] = {}  # this rank's, of a backward
        call = super().attach(model)
        for embedding, _ in self._embeddings.values():
            embedding.sparse = True  # backward computes only the rows of the batch
        return call

    def make_units(self, model: nn.Module) -> list[Unit]:
        dense = [named for named in self.parameters if named[1] not in self._embeddings]
        most = min(self.options.bucket_mb, self.most_mb)
        groups = plan_buckets(dense, most, min(self.options.first_bucket_mb, most))
        units = [Unit(k, f"bucket {k}", group, self.rank, self.ranks) for k, group in enumerate(groups)]
        tables = [named for named in reversed(self.parameters) if named[1] in self._embeddings]
        return units + [self.make_table(k, named) for k, named in enumerate(tables, start=len(units))]

    def make_table(self, number: int, named: Named) -> Unit:
        """The unit of an embedding."""
        raise NotImplementedError

    def has_rows(self, unit: Unit) -> bool:
        """Whether it is such an embedding."""
        return unit.named[0][1] in self._embeddings

    def put(self, unit: Unit, place: int, gradient: torch.Tensor | None) -> None:
        if self.has_rows(unit):
            self._rows[unit] = rows_of(gradient, unit.named[0][1])
        else:
            super().put(unit, place, gradient)

    def detach(self) -> None:
        for embedding, was_sparse in self._embeddings.values():
            embedding.sparse = was_sparse
        super().detach()


def rows_of(gradient: torch.Tensor | None, weight: torch.Tensor) -> Rows:
    """A gradient's rows. All of them, if it is dense."""
    if gradient is None:
        return torch.empty(0, dtype=torch.int64), weight.new_empty(0, weight.shape[1])
    if gradient.layout == torch.strided:
        return torch.arange(len(weight)), gradient
    together = gradient.coalesce()
    return together.indices()[0], together.values()


def average_rows(unit: Unit, rows: Iterable[Rows], ranks: int) -> torch.Tensor:
    """The average of all ranks' rows in this rank's part of the unit, (length,): zeros where nobody has a row."""
    ((_, weight),) = unit.named
    average = weight.new_zeros(unit.length // weight.shape[1], weight.shape[1])
    first = unit.rank * len(average)
    for numbers, values in rows:
        mine = ((numbers >= first) & (numbers < first + len(average))).nonzero().flatten()
        average.index_add_(0, numbers[mine] - first, values[mine], alpha=1 / ranks)
    return average.view(-1)
