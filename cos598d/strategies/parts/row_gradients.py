"""Gradients of embeddings by the rows that were looked up: they travel alone, and every rank has their sums."""

from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import ReduceScatters
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.parts.embedding_rows import EmbeddingRows
from cos598d.strategies.parts.gradients import ShardedGradients
from cos598d.strategies.parts.packed_sums import PackedReduceScatters
from cos598d.strategies.parts.units import Unit, longest_parts
from cos598d.sync.parts.embeddings import large_embeddings, make_sparse

LEAST_BYTES = 512 << 10  # of an embedding; below it the rows that stay where they are would be too few to matter


def row_embeddings(model: nn.Module) -> dict[nn.Parameter, nn.Embedding]:
    """The weights that are looked up and nothing else, and large enough, by their modules.

    Left out are those whose forward changes them (`max_norm`), and those whose rows' gradients depend on how often each
    was looked up (`scale_grad_by_freq`), which torch computes as dense ones.
    """
    found = large_embeddings(model, LEAST_BYTES)
    return {p: one for p, one in found.items() if one.max_norm is None and not one.scale_grad_by_freq}


class RowGradients(ShardedGradients):
    """As ShardedGradients that keep, but of a table, an embedding's gradient, rows travel, and all ranks get the sum.

    1. In forward every rank notes the rows that each table is asked for, in all micro-batches of the step.
    2. When backward has its first gradient, forward is over: every rank sends the others a bit for each row of every
       table, whether it has noted it. They travel beside backward.
    3. A table's gradient is sparse. When it is there, its rows travel (`Table.start`).
    4. `finish` adds them up, in order of rank: so all ranks have the same sums, to the last bit.
    """

    def attach(self, model: nn.Module) -> nn.Module:
        self.embeddings = row_embeddings(model)
        module = super().attach(model)
        self._put_back = make_sparse(self.embeddings.values())
        for table, noted in zip(self.tables.values(), self._by_table(self._noted), strict=True):
            embedding = self.embeddings[table.parameter]
            self._handles.append(embedding.register_forward_pre_hook(_noting(noted), with_kwargs=True))
        return module

    def begin_sums(self) -> None:
        dense = [unit for unit in self.units if unit.parameters[0][1] not in self.embeddings]
        kind = PackedReduceScatters if self.options.pack_gradients else ReduceScatters
        self._sums = kind(self.comm, longest_parts(dense))
        self.tables = {unit: EmbeddingRows(self.comm, unit) for unit in self.units if unit not in dense}
        self._lengths = [len(table.sums) for table in self.tables.values()]
        self._noted = torch.zeros(-(-sum(self._lengths) // 8) * 8, dtype=torch.bool, device=self.comm.device)
        self._told: _Told | None = None  # of this backward
        self._started: list[EmbeddingRows] = []

    def begin_backward(self) -> None:
        if self.tables:
            self._told = _Told(self.comm, self._noted, next(iter(self.tables)).weights_tag)
        dense = (unit for unit in self._order if unit not in self.tables)
        self._sums.expect((unit.empty(0), unit.lengths, unit.gradients_tag) for unit in dense)

    def start(self, unit: Unit) -> None:
        if unit not in self.tables:
            super().start(unit)
            return
        assert self._told is not None
        by_rank = [self._by_table(noted)[list(self.tables).index(unit)] for noted in self._told.wait()]
        table = self.tables[unit]
        self._shards[unit] = table.sums.view(-1)
        table.start(by_rank)
        self._started.append(table)

    def end_sums(self) -> None:
        super().end_sums()
        for table in self._started:
            table.end()
        self._started = []

    def add(self, unit: Unit, place: int, gradient: torch.Tensor, is_first: bool) -> None:
        if unit in self.tables:
            self.tables[unit].add(gradient)
        else:
            super().add(unit, place, gradient, is_first)

    def rows(self, unit: Unit) -> torch.Tensor | None:
        return self.tables[unit].is_summed

    def squares(self) -> torch.Tensor:
        """As every sharded gradient's; of tables, of which every rank has all, an n-th of the rows."""
        rank, ranks = self.comm.rank, self.comm.world_size
        return super().squares() + sum(table.squares(rank, ranks) for table in self.tables.values())

    def scale(self, factor: torch.Tensor | float) -> None:
        super().scale(factor)
        for table in self.tables.values():
            table.scale(factor)

    def shards(self) -> list[torch.Tensor]:
        """As every sharded gradient's, but for tables, of which only some rows are anything."""
        return [self.shard(unit) for unit in self.units if unit not in self.tables and len(self.shard(unit))]

    def forget(self) -> None:
        """As every sharded gradient's. What tables hold stays as it is until the next step's is added."""
        super().forget()
        self._noted.zero_()
        for table in self.tables.values():
            table.forget()

    def gradient_tensors(self) -> list[torch.Tensor]:
        return super().gradient_tensors() + [each for table in self.tables.values() for each in table.tensors()]

    def bucket_tensors(self) -> list[torch.Tensor]:
        return [*super().bucket_tensors(), self._noted]

    def detach(self) -> None:
        self._put_back()
        self.tables, self.embeddings, self._told = {}, {}, None
        super().detach()

    def _by_table(self, noted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return noted[: sum(self._lengths)].split(self._lengths)


class _Told:
    """The rows that every rank has noted, under way to all others as bits."""

    def __init__(self, comm: Communicator, noted: torch.Tensor, tag: int):
        """`noted`, (rows of all tables, a multiple of 8): this rank's, as they are now."""
        self._noted, self._rank = noted.clone(), comm.rank  # a forward may follow, whose backward is another
        self._powers = 2 ** torch.arange(8, dtype=torch.uint8, device=noted.device)
        bits = (noted.view(-1, 8) * self._powers).sum(dim=1, dtype=torch.uint8)
        self._landings = {rank: torch.empty_like(bits) for rank in range(comm.world_size) if rank != comm.rank}
        self._call = comm.compose("all_gather", bits, "rows looked up", purpose=AGREEMENT)
        self._messages = self._call.start(
            [(bits, rank) for rank in self._landings], [(bits, rank) for rank, bits in self._landings.items()], tag
        )
        self._by_rank: list[torch.Tensor] = []

    def wait(self) -> list[torch.Tensor]:
        """The rows in order of rank, each (rows of all tables,). May be called more than once."""
        if not self._by_rank:
            self._messages.wait()
            self._call.end()
            others = {rank: (bits[:, None] & self._powers).ne(0).flatten() for rank, bits in self._landings.items()}
            self._by_rank = [noted for _, noted in sorted((others | {self._rank: self._noted}).items())]
        return self._by_rank


def _noting(noted: torch.Tensor):
    """A hook that is called before an embedding's forward, and marks the rows that it asks for."""

    def note(module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        # Without gradients too while it trains: a layer that is computed again in backward computes first without.
        if module.training or torch.is_grad_enabled():
            noted[(arguments[0] if arguments else keywords["input"]).flatten()] = True

    return note
