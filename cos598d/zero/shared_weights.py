"""ZeRO stage 1 on one host: weights stored once, in memory that all ranks map; each steps its n-th of them in place."""

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.sync.base import Named
from cos598d.sync.buckets import plan_buckets
from cos598d.sync.options import BucketSizes
from cos598d.sync.shared_memory import ranks_by_host, share
from cos598d.zero.flags import Flags
from cos598d.zero.rows import SharedTable, make_sparse, row_embeddings
from cos598d.zero.unit import Unit
from cos598d.zero.zero1 import Zero1

CACHE_LINE = 64  # bytes
BLOCK_BYTES = 256 << 10  # small enough to stay in a core's cache while the ranks' blocks are added to it
MEET, BACKWARD, ADDED = range(3)  # stages of a step; those after them are the units
STAGES = ("reach this point of the step", "end backward", "add up gradients")


class SharedWeights(Zero1):
    """`zero1` for the ranks of one host: the weights are stored once, in memory that all ranks map.

    1. Units are as in `zero1`, each cut into n parts. Their weights are in shared memory, where every rank's model uses
       them. Next to them are n segments, one for each rank's gradients. An embedding of at least half a MiB that is
       only looked up is a unit by itself, cut between rows.
    2. When backward has computed a gradient, it is copied into the rank's own segment; of such an embedding only the
       rows of the batch, which are marked. When all ranks have filled a unit, rank r adds part r of all segments, of an
       embedding the marked rows, to its own: a rank reads only part r of the others' segments.
    3. After its sums, rank r writes the squares of its parts where all can read them, for the gradient's norm.
    4. When all ranks have come to the step, nobody reads weights. The optimizer of rank r steps the pieces in part r in
       place. When all have stepped, every rank has the new weights.

    The weights are one memory for all ranks: only the optimizer and `load_state` may change them. A script that does it
    in place, on every rank, would do it n times; that is an error in the next forward (not if it changes `p.data`).

    Cost for a gradient of S bytes: nothing is sent, and no collective is called. Every rank reads (2 + 1/n) S of memory
    and writes (1 + 1/n) S, beside its optimizer's work on S/n: to copy gradients S and S, to add them up S and S/n, for
    the norm S/n. It waits for the others three times in a step. Memory: (n+1) S for all ranks of the host together,
    where `zero1` has 2n S, and with AdamW 2S/n of state on each. Choose it when all ranks share a host: it copies,
    sends and computes less than any other exact sync there.
    """

    options_kind = BucketSizes

    def attach(self, model: nn.Module) -> Callable:
        for name, p in model.named_parameters():
            if p.device.type != "cpu":
                raise UserError(
                    f"shared_weights needs tensors in the host's memory, and {name} is on {p.device}. Choose zero1."
                )
        hosts = ranks_by_host(self)
        if len(hosts) > 1:
            raise UserError(
                f"shared_weights needs all ranks on one host, and rank {hosts[1][0]} is on another host than rank 0. "
                "Choose zero1 or sparse_zero1."
            )
        self._embeddings = row_embeddings(model)
        self._tables: dict[Unit, SharedTable] = {}
        self._filled: deque[Unit] = deque()  # by this rank; not added up yet
        self._is_open = True  # all ranks have added up the last backward's gradients
        call = super().attach(model)
        self._undo = make_sparse(self._embeddings.values())
        self._versions = [p._version for _, p in self.parameters]
        self._flags.meet(MEET)
        return call

    def plan(self, model: nn.Module) -> list[tuple[str, list[Named]]]:
        dense = [named for named in self.parameters if named[1] not in self._embeddings]
        groups = plan_buckets(dense, self.options.bucket_mb, self.options.first_bucket_mb)
        tables = [(name, [(name, p)]) for name, p in reversed(self.parameters) if p in self._embeddings]
        return [(f"bucket {k}", group) for k, group in enumerate(groups)] + tables

    def make_unit(self, number: int, name: str, named: Sequence[Named]) -> Unit:
        p = named[0][1]
        align = p.shape[1] if p in self._embeddings else CACHE_LINE // p.element_size()
        return Unit(number, name, named, self.rank, self.ranks, align)

    def lay_all(self) -> None:
        stages = [*STAGES, *(f"fill {unit.name}" for unit in self.units)]
        self._flags = Flags(self, stages, note_bytes=max(8, len(self.parameters)))
        self._blocks: dict[Unit, list[list[torch.Tensor]]] = {}  # of this rank's own part, each with the others'
        everyone = range(self.ranks)
        for unit in self.units:
            weights, *segments = share(self, unit.empty(), everyone, 1 + self.ranks)
            unit.hold(weights)
            unit.collect(segments[self.rank])
            if unit.named[0][1] in self._embeddings:
                marks = share(self, torch.empty(len(weights) // unit.align, dtype=torch.uint8), everyone, self.ranks)
                self._tables[unit] = SharedTable(unit, segments, marks)
            else:
                parts = [unit.part_of(segments[(self.rank + k) % self.ranks]) for k in everyone]
                cut = (part.split(BLOCK_BYTES // part.element_size()) for part in parts)
                self._blocks[unit] = [list(block) for block in zip(*cut, strict=True)]

    def begin_forward(self) -> None:
        super().begin_forward()
        for (name, p), version in zip(self.parameters, self._versions, strict=True):
            if p._version != version:
                raise UserError(
                    f"{name} was changed in place, and under shared_weights it is one memory for all ranks: each would "
                    "change it. Choose zero1."
                )

    def put(self, unit: Unit, place: int, gradient: torch.Tensor | None) -> None:
        if not self._is_open:
            self._flags.wait(ADDED)
            self._is_open = True
        if unit in self._tables:
            self._tables[unit].put(gradient)
        else:
            super().put(unit, place, gradient)

    def start_sum(self, unit: Unit) -> None:
        self._flags.come(len(STAGES) + unit.number)
        self._filled.append(unit)
        self.end_sums(wait=False)

    def end_sums(self, wait: bool) -> None:
        while self._filled and (wait or not self._flags.late(len(STAGES) + self._filled[0].number)):
            unit = self._filled.popleft()
            self._flags.wait(len(STAGES) + unit.number)
            if unit in self._tables:
                self._tables[unit].add_up()
            else:
                for own, *others in self._blocks[unit]:
                    for other in others:
                        own += other
                    own /= self.ranks
            self._averages[unit] = unit.part_of(unit.flat_gradients)

    def agree(self, has: list[bool]) -> list[bool]:
        if not self.options.find_unused_parameters:
            return super().agree(has)
        return [any(users) for users in zip(*self._flags.meet(BACKWARD, bytes(has)), strict=True)]

    def finish(self) -> None:
        super().finish()
        self._flags.come(ADDED)
        self._is_open = False
        for unit, _, part in self.cut.pieces:
            if unit in self._tables:
                self.cut.note_rows(part, self._tables[unit].summed, unit.align)

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        every = self._flags.meet(MEET, struct.pack("d", squares.item()))
        return squares.new_tensor(sum(struct.unpack("d", number)[0] for number in every))

    def before_step(self) -> None:
        super().before_step()
        self._flags.meet(MEET)

    def after_step(self) -> None:
        self._flags.meet(MEET)

    def settle(self) -> None:
        super().settle()
        self._flags.meet(MEET)  # before a rank loads other weights, all have come here, and read theirs no more

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_whole(state)
        self._versions = [p._version for _, p in self.parameters]
        self._flags.meet(MEET)

    def detach(self) -> None:
        self._undo()
        super().detach()
        self._flags.meet(MEET)
        self._flags.close()
        self._tables, self._blocks = {}, {}
