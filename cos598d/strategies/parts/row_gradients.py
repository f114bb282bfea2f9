"""Gradients of embeddings by row: only rows that were looked up are sent, and every rank gets their sums."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cos598d.comm.calls import Pending
from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import ReduceScatters
from cos598d.comm.messages import Messages, PointToPointCollective
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.parts.gradients import ShardedGradients
from cos598d.strategies.parts.packed_sums import PackedReduceScatters
from cos598d.strategies.parts.units import Unit, longest_parts
from cos598d.sync.buckets import MIB
from cos598d.sync.parts.embeddings import large_embeddings, make_sparse

LEAST_BYTES = 512 << 10  # in an embedding; a smaller one would save too little


def row_embeddings(model: nn.Module) -> dict[nn.Parameter, nn.Embedding]:
    """The weights, large enough, that are only looked up, each with its module.

    Excluded are those that forward changes (`max_norm`) and those with `scale_grad_by_freq`. The latter scale a row's
    gradient by how often it was looked up, which torch computes as a dense gradient.
    """
    found = large_embeddings(model, LEAST_BYTES)
    return {p: one for p, one in found.items() if one.max_norm is None and not one.scale_grad_by_freq}


class RowGradients(ShardedGradients):
    """As ShardedGradients with `keeps`, but a table (an embedding's gradient) is sent by rows, to all ranks.

    1. In forward every rank marks the rows that each table is asked for, in all micro-batches of the step.
    2. When backward has its first gradient, forward is over. Every rank then sends the others one bit for each row of
       every table, during backward.
    3. A table's gradient is sparse. When it is ready, its rows are sent (`EmbeddingRows.start`).
    4. `finish` adds them up in order of rank, so all ranks have the same sums to the last bit.

    sums_kind: the class that sums the gradients of everything except the tables.
    """

    sums_kind: type[ReduceScatters] = ReduceScatters

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
        self._sums = self.sums_kind(self.comm, longest_parts(dense))
        self.tables = {unit: EmbeddingRows(self.comm, unit) for unit in self.units if unit not in dense}
        self._lengths = [len(table.sums) for table in self.tables.values()]
        self._noted = torch.zeros(-(-sum(self._lengths) // 8) * 8, dtype=torch.bool, device=self.comm.device)
        self._looked_up_rows: _LookedUpRows | None = None  # of this backward
        self._started: list[EmbeddingRows] = []

    def begin_backward(self) -> None:
        if self.tables:
            self._looked_up_rows = _LookedUpRows(self.comm, self._noted, next(iter(self.tables)).weights_tag)
        dense = (unit for unit in self._order if unit not in self.tables)
        self._sums.expect((unit.empty(0), unit.lengths, unit.gradients_tag) for unit in dense)

    def start(self, unit: Unit) -> None:
        if unit not in self.tables:
            super().start(unit)
            return
        assert self._looked_up_rows is not None
        by_rank = [self._by_table(noted)[list(self.tables).index(unit)] for noted in self._looked_up_rows.wait()]
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
        return self.tables[unit].is_summed if unit in self.tables else None

    def squares(self) -> torch.Tensor:
        """As in ShardedGradients. Of tables, which every rank has complete, it counts one n-th of the rows."""
        rank, ranks = self.comm.rank, self.comm.world_size
        return super().squares() + sum(table.squares(rank, ranks) for table in self.tables.values())

    def scale(self, factor: torch.Tensor | float) -> None:
        super().scale(factor)
        for table in self.tables.values():
            table.scale(factor)

    def shards(self) -> list[torch.Tensor]:
        """As in ShardedGradients, without tables: only some of their rows are nonzero."""
        return [self.shard(unit) for unit in self.units if unit not in self.tables and len(self.shard(unit))]

    def forget(self) -> None:
        """As in ShardedGradients. Tables keep their values until the next step's are added."""
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
        self.tables, self.embeddings, self._looked_up_rows = {}, {}, None
        super().detach()

    def _by_table(self, noted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return noted[: sum(self._lengths)].split(self._lengths)


class PackedRowGradients(RowGradients):
    """As RowGradients, with gradients sent in fewer bits, without loss."""

    sums_kind = PackedReduceScatters


class _LookedUpRows:
    """The rows that every rank has marked, sent to all others as bits."""

    def __init__(self, comm: Communicator, noted: torch.Tensor, tag: int):
        """`noted`, (rows of all tables, a multiple of 8): this rank's marks now."""
        self._noted, self._rank = noted.clone(), comm.rank  # copied, since a forward for another backward may follow
        self._powers = 2 ** torch.arange(8, dtype=torch.uint8, device=noted.device)
        bits = (noted.view(-1, 8) * self._powers).sum(dim=1, dtype=torch.uint8)
        self._landings = {rank: torch.empty_like(bits) for rank in range(comm.world_size) if rank != comm.rank}
        self._call = comm.compose("all_gather", bits, "rows looked up", purpose=AGREEMENT)
        self._messages = self._call.start(
            [(bits, rank) for rank in self._landings], [(bits, rank) for rank, bits in self._landings.items()], tag
        )
        self._by_rank: list[torch.Tensor] = []

    def wait(self) -> list[torch.Tensor]:
        """The marks in order of rank, each (rows of all tables,). May be called more than once."""
        if not self._by_rank:
            self._messages.wait()
            self._call.end()
            others = {rank: (bits[:, None] & self._powers).ne(0).flatten() for rank, bits in self._landings.items()}
            self._by_rank = [noted for _, noted in sorted((others | {self._rank: self._noted}).items())]
        return self._by_rank


def _noting(noted: torch.Tensor):
    """A hook before an embedding's forward that marks the rows it looks up."""

    def note(module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        # In training also without gradients: the first forward of a checkpointed layer runs without them.
        if module.training or torch.is_grad_enabled():
            noted[(arguments[0] if arguments else keywords["input"]).flatten()] = True

    return note


class EmbeddingRows:
    """An embedding's gradient, (rows, width).

    1. `add` keeps this rank's own gradient of a backward, sparse as torch computes it, each row once.
    2. `start`: all ranks know the rows that each of them has marked. Every rank sends the values of its own rows
       directly to all others. A ring all-reduce of the rows that any rank has marked replaces this if it sends at least
       a MiB less. It needs more messages, one after the other.
    3. `end` adds them to `sums` in order of rank, so every rank gets the same bits.
    A gradient may have more than the marked rows, if the weight is also read directly. Its rank then sets a last row
    next to the values. All ranks all-reduce the whole gradient, this time and from then on.
    """

    def __init__(self, comm: Communicator, unit: Unit):
        ((self._name, self.parameter),) = unit.parameters
        self._comm, self._tag = comm, unit.gradients_tag
        self.sums = torch.zeros_like(self.parameter.data, memory_format=torch.contiguous_format)
        # the rows that are not zeros
        self.is_summed = torch.zeros(len(self.sums), dtype=torch.bool, device=self.sums.device)
        self._is_old = False  # the sums are an earlier step's
        self._is_whole = False  # all rows are sent
        self._own: torch.Tensor | None = None
        self._terms: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows, and values with the last row
        self._under_way: Pending | None = None

    def add(self, gradient: torch.Tensor) -> None:
        """Add to this rank's own gradient: sparse, or dense if the weight was not only looked up."""
        own = gradient if self._own is None else _sum(self._own, gradient)
        self._own = own.coalesce() if own.is_sparse else own

    def start(self, noted: Sequence[torch.Tensor]) -> None:
        """Start the sum of a backward's gradients; this rank's is complete. noted: (rows,) bool, in order of rank."""
        if self._is_whole:
            self._terms = [(_all_rows(self.sums), self._whole())]
            self._under_way = self._comm.all_reduce(self._terms[0][1], self._name, async_op=True)
            return
        ranks, rank = self._comm.world_size, self._comm.rank
        union = torch.stack(list(noted)).any(dim=0)
        rows = [each.nonzero().flatten() for each in noted]
        directly = (ranks - 1) * max(map(len, rows))
        in_a_ring = 2 * (ranks - 1) * int(union.sum()) / ranks
        if (directly - in_a_ring) * self.sums[0].nbytes > MIB:
            values = self._values(union, noted[rank])
            self._terms = [(union.nonzero().flatten(), values)]
            self._under_way = self._comm.all_reduce(values, self._name, async_op=True)
            return
        own = self._values(noted[rank], noted[rank])
        self._terms = [
            (each, own if other == rank else own.new_empty(len(each) + 1, own.shape[1]))
            for other, each in enumerate(rows)
        ]
        others = self._comm.others
        call = self._comm.compose("all_gather", own, self._name)
        messages = call.start(
            [(own, other) for other in others], [(self._terms[other][1], other) for other in others], self._tag
        )
        self._under_way = _RowExchange(call, messages)

    def end(self) -> None:
        """Block until the started sum over all ranks has been added to this step's `sums`."""
        assert self._under_way is not None
        self._under_way.wait()
        if not self._is_whole and any(values[-1, 0] for _, values in self._terms):
            self._is_whole = True
            self._terms = [(_all_rows(self.sums), self._whole())]
            self._comm.all_reduce(self._terms[0][1], self._name)
            if self._comm.rank == 0:
                warnings.warn(
                    f"{self._name} is also used outside its embedding's forward, so any row may have a gradient. All "
                    "rows are sent.",
                    stacklevel=2,
                )
        if self._is_old:
            self.sums[self.is_summed] = 0
            self.is_summed.zero_()
            self._is_old = False
        for rows, values in self._terms:
            self.sums.index_add_(0, rows, values[: len(rows)])
            self.is_summed[rows] = True
        self._own, self._under_way, self._terms = None, None, []

    def forget(self) -> None:
        """End the step."""
        self._own, self._is_old = None, True

    def squares(self, part: int, parts: int) -> torch.Tensor:
        """The sum of the squares of part `part` of `parts` of the sums, in float64."""
        rows = self.is_summed.nonzero().flatten().tensor_split(parts)[part]
        return torch.linalg.vector_norm(self.sums[rows]).double().square()

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the sums in place. Zeros stay zeros, even if the factor is not a number."""
        self.sums[self.is_summed] *= factor

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold gradients."""
        held = [self.sums, *(values for _, values in self._terms)]
        if self._own is not None:
            held += [self._own._indices(), self._own._values()] if self._own.is_sparse else [self._own]
        return held

    def _values(self, rows: torch.Tensor, noted: torch.Tensor) -> torch.Tensor:
        """This rank's gradient in those rows, (rows,) bool, and a last row: ones if it has others, too."""
        values = self.sums.new_zeros(int(rows.sum()) + 1, self.sums.shape[1])
        own = self._own
        if own is not None and own.is_sparse and bool(noted[own.indices()[0]].all()):
            places = rows.cumsum(0) - 1
            values[places[own.indices()[0]]] = own.values()
        elif own is not None:
            values[-1] = 1
        return values

    def _whole(self) -> torch.Tensor:
        """A new dense tensor with this rank's gradient in all rows."""
        whole = torch.zeros_like(self.sums)
        return whole if self._own is None else whole.add_(self._own)


class _RowExchange:
    """Rows being sent to all ranks. `wait` blocks until all have arrived, and enters them in the ledger."""

    def __init__(self, call: PointToPointCollective, messages: Messages):
        self._call, self._messages = call, messages

    def wait(self) -> None:
        self._messages.wait()
        self._call.end()


def _sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of sparse or dense tensors: torch adds a sparse one to a dense one, but not the other way round."""
    return second + first if first.is_sparse else first + second


def _all_rows(sums: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(sums), device=sums.device)
