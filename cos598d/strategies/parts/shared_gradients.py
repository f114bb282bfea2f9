"""Gradients of the ranks of one host, summed in place, in memory that all of them map."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from cos598d.comm.messages import PointToPointCollective
from cos598d.errors import UserError
from cos598d.strategies.parts.cast_weights import linear_layers
from cos598d.strategies.parts.gradients import ShardedGradients
from cos598d.strategies.parts.units import Unit
from cos598d.sync.parts.embeddings import large_embeddings, make_sparse
from cos598d.sync.parts.shared_buffers import Segments, check_on_host, find_one_host, in_blocks

NAME = "shared_weights"
FILL, ADD, COME, END = "fill", "add up", "come to", "end"


class SharedGradients(ShardedGradients):
    """As ShardedGradients with `keeps`, but a unit's flat tensor is in this rank's segment, which the others read.

    1. A gradient that backward has computed is copied into the segment. A large embedding's gradient is sparse: its
       rows are added to zeros there, and marked.
    2. The last gradient of a unit raises this rank's flag. When all ranks have raised theirs, rank r adds part r of the
       others' segments to its own part r, in order of rank. Of an embedding it adds only the rows that they have
       marked. During backward it does so without waiting; `finish` waits for the rest.
    3. Before a rank writes into its segment again, all ranks must have finished adding. It checks that, and hardly ever
       waits.
    Rank r reads only part r of others' segments, so nobody sees changes to its sums, such as clipping.
    """

    cast_to: torch.dtype | None = None  # segments then also have room for linear layers' weights in this dtype

    def attach(self, model: nn.Module) -> nn.Module:
        check_on_host(model, NAME)
        _check_forward_changes_nothing(model)
        (self._members,) = find_one_host(self.comm, NAME, instead="zero1")
        self.embeddings = large_embeddings(model)
        self._linear = linear_layers(model) if self.cast_to else {}
        module = super().attach(model)
        self._put_back = make_sparse(self.embeddings.values())
        return module

    def begin_sums(self) -> None:
        embeddings = [unit for unit in self.units if unit.parameters[0][1] in self.embeddings]
        buffers = [(unit.elements, unit.dtype) for unit in self.units]
        buffers += [(len(unit.parameters[0][1]), torch.uint8) for unit in embeddings]
        names = [unit.name for unit in (*self.units, *embeddings)]
        self.step_place = len(buffers)  # of the buffer with one number per rank, for the step
        copied = [unit for unit in self.units if any(p in self._linear for _, p in unit.parameters)]
        self.segments = Segments(
            self.comm,
            self._members,
            [*buffers, (1, torch.float64)],
            (FILL, ADD, COME, END),
            [*names, "the step"],
            [(unit.elements, self.cast_to) for unit in copied if self.cast_to],
        )
        self.copies = dict(zip(copied, self.segments.common, strict=True))
        # A single rank has only its own segments.
        every = [parts or [own] for parts, own in zip(self.segments.every, self.segments.own, strict=True)]
        marks = every[len(self.units) : self.step_place]
        self._rows = {
            unit: _Rows(unit, self.comm.rank, every[unit.number], marked)
            for unit, marked in zip(embeddings, marks, strict=True)
        }
        # Cut once, because each step uses the same blocks.
        self._blocks = {unit: self._cut(unit, every[unit.number]) for unit in self.units if unit not in self._rows}
        for unit in self.units:
            self.lay(unit, self.segments.own[unit.number])
        self._round, self._is_open = 1, True
        self._under_way: deque[tuple[Unit, bool, PointToPointCollective]] = (
            deque()
        )  # unit, whether it adds, row of the ledger

    def start_sum(self, unit: Unit, flat: torch.Tensor, adds: bool) -> None:
        self.segments.raise_flag(FILL, unit.number, self._round)
        self._under_way.append((unit, adds, self.comm.compose(NAME, flat, unit.name)))
        self._add_up(waits=False)

    def end_sums(self) -> None:
        self._add_up(waits=True)
        self.segments.raise_flag(ADD, self.step_place, self._round)
        self._round += 1
        self._is_open = False

    def stays(self, unit: Unit) -> bool:
        return True

    def flat(self, unit: Unit) -> torch.Tensor:
        if not self._is_open:
            self.segments.wait(ADD, self.step_place, self._round - 1)
            self._is_open = True
        return super().flat(unit)

    def add(self, unit: Unit, place: int, gradient: torch.Tensor, is_first: bool) -> None:
        if unit not in self._rows:
            super().add(unit, place, gradient, is_first)
            return
        if is_first:
            self.flat(unit)
            self._rows[unit].clear()
        self._rows[unit].add(gradient)

    def clear(self, unit: Unit, place: int) -> None:
        if unit in self._rows:
            self._rows[unit].clear()
        else:
            super().clear(unit, place)

    def rows(self, unit: Unit) -> torch.Tensor | None:
        return self._rows[unit].marked if unit in self._rows and unit not in self._reduced else None

    def squares(self) -> torch.Tensor:
        return super().squares() + sum(rows.squares() for rows in self._sums_of_rows())

    def scale(self, factor: torch.Tensor | float) -> None:
        super().scale(factor)
        for rows in self._sums_of_rows():
            rows.scale(factor)

    def shards(self) -> list[torch.Tensor]:
        """As in ShardedGradients, without those of which only marked rows are nonzero."""
        of_rows = {unit for unit in self._rows if unit not in self._reduced}
        return [self.shard(unit) for unit in self.units if unit not in of_rows and len(self.shard(unit))]

    def gradient_tensors(self) -> list[torch.Tensor]:
        """The gradients' part of this rank's segment: views of memory that all ranks share."""
        return [self.segments.own[unit.number] for unit in self.units]

    def bucket_tensors(self) -> list[torch.Tensor]:
        """The rest of this rank's segment: also views."""
        return self.segments.own[len(self.units) :]

    def detach(self) -> None:
        self._put_back()
        self._rows, self._blocks, self.embeddings = {}, {}, {}
        self._under_way.clear()
        self._linear, self.copies = {}, {}
        self.segments.close()
        super().detach()

    def _add_up(self, waits: bool) -> None:
        """Add up this rank's parts of the started units: all of them, or only those that need no waiting."""
        while self._under_way:
            unit, adds, call = self._under_way[0]
            if waits:
                self.segments.wait(FILL, unit.number, self._round)
            elif self.segments.missing(FILL, unit.number, self._round):
                return
            self._under_way.popleft()
            if unit in self._rows:
                self._rows[unit].add_up()
            else:
                for own, *others in self._blocks[unit]:
                    for other in others:
                        own += other
            if adds:  # the sum of an earlier backward, set aside, is the shard
                self.shard(unit).add_(self._own_part(unit))
            call.end()

    def _sums_of_rows(self) -> list["_Rows"]:
        """The embeddings whose sum is in the segment. Sums of several backwards are set aside instead."""
        return [rows for unit, rows in self._rows.items() if unit not in self._reduced]

    def _own_part(self, unit: Unit) -> torch.Tensor:
        return unit.parts(self.segments.own[unit.number])[self.comm.rank]

    def _cut(self, unit: Unit, every: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """This rank's part of its own segment, in blocks, each with the same block of all other segments."""
        parts = [unit.parts(flat)[self.comm.rank] for flat in every]
        own = parts.pop(self.comm.rank)
        return in_blocks([own, *parts])


class _Rows:
    """A large embedding's gradients, (rows, width) in every rank's segment: zeros except in marked rows.

    A rank marks the rows to which it has added, with a byte per row. Other ranks read the marks only in their own part,
    as they do with the gradients.
    """

    def __init__(self, unit: Unit, rank: int, gradients: Sequence[torch.Tensor], marks: Sequence[torch.Tensor]):
        """`gradients` and `marks`: this unit's parts of every rank's segment, in order of rank."""
        rows, width = unit.parameters[0][1].shape
        views = [flat.view(rows, width) for flat in gradients]
        self._own, self._marks = views[rank], marks[rank]
        counts = [length // width for length in unit.lengths]
        self._first = sum(counts[:rank])
        parts = [marked[self._first : self._first + counts[rank]] for marked in marks]
        self.marked = parts[rank].view(torch.bool)  # in this rank's part
        self._others = [pair for other, pair in enumerate(zip(views, parts, strict=True)) if other != rank]

    def clear(self) -> None:
        """Fill with zeros."""
        self._own[_marked(self._marks)] = 0
        self._marks.zero_()

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient, (rows, width): sparse, or dense if the weight was not only looked up."""
        if gradient.layout == torch.sparse_coo:
            (ids,) = gradient._indices()
            self._own.index_add_(0, ids, gradient._values())
            self._marks[ids] = 1
        else:
            self._own += gradient
            self._marks.fill_(1)

    def add_up(self) -> None:
        """Add to this rank's part the rows that other ranks have marked in it, in order of rank."""
        for theirs, marked in self._others:
            rows = _marked(marked) + self._first
            self._own.index_add_(0, rows, theirs[rows])
            self._marks[rows] = 1
        self._summed = _marked(self.marked) + self._first

    def squares(self) -> torch.Tensor:
        """The sum of the squares of this rank's sums, in float64."""
        return torch.linalg.vector_norm(self._own[self._summed]).double().square()

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply them in place. Zeros stay zeros, even if the factor is not a number."""
        self._own[self._summed] *= factor


def _marked(marks: torch.Tensor) -> torch.Tensor:
    return marks.nonzero().flatten()


def _check_forward_changes_nothing(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"{name} has a max_norm, so its forward changes weights, but all ranks share them under --sync {NAME}. "
                "Choose --sync zero1."
            )
