"""ZeRO stage 1 on one host: weights stored once, in memory that all ranks map; each steps its n-th of them in place."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT
from cos598d.sync.base import GradientSync, Named
from cos598d.sync.shared_memory import need_one_host, share
from cos598d.zero.rows import Table
from cos598d.zero.sparse_zero1 import SparseZero1
from cos598d.zero.unit import Unit


class SharedWeights(SparseZero1):
    """`zero1` for the ranks of one host: the weights are stored once, in memory that all ranks map.

    1. Units are as in `zero1`, each cut into n parts. Their weights are in shared memory, where every rank's model uses
       them. Next to them are n segments, one for each rank's gradients. An embedding of at least half a MiB that is
       only looked up is a unit by itself, cut between rows.
    2. When backward has computed a gradient, it is copied into the rank's own segment; of such an embedding only the
       rows of the batch, with their numbers. A full unit is announced. When all ranks have filled it, rank r averages
       part r of all segments, of an embedding the rows in it: a rank reads only part r of the others' segments.
    3. When all ranks have averaged, the segments may be filled again.
    4. When all ranks have come to the step, nobody reads weights. The optimizer of rank r steps the pieces in part r in
       place. When all have stepped, every rank has the new weights.

    The weights are one memory for all ranks: only the optimizer and `load_state` may change them. A script that does it
    in place, on every rank, would do it n times; that is an error in the next forward (not if it changes `p.data`).

    Cost for a gradient of S bytes in B units: nothing is sent but B + 3 announcements, all-reduces of 4 bytes. Every
    rank reads (2 + 1/n) S of memory and writes (1 + 1/n) S, beside its optimizer's work on S/n: to copy gradients S and
    S, to average them S and S/n, for the norm S/n. Memory: (n+1) S for all ranks of the host together, where `zero1`
    has 3n S, and with AdamW 2S/n of state on each. Choose it when all ranks share a host: it copies, sends and computes
    less than any other exact sync there.
    """

    takes = (*GradientSync.takes, "bucket_mb", "first_bucket_mb")
    most_mb, cuts_tables = math.inf, True

    def attach(self, model: nn.Module) -> Callable:
        need_one_host(self, "zero1 or sparse_zero1")
        call = super().attach(model)
        self._versions = [p._version for _, p in self.parameters]
        return call

    def make_bucket(self, name: str, group: Sequence[Named]) -> Any:
        unit, n, p = super().make_bucket(name, group), self.ranks, group[0][1]
        (memory,) = share(self, p.new_empty((1 + n) * n * unit.length), 1)
        weights, *segments = memory.view(1 + n, -1)
        unit.hold(weights)
        unit.gradients, unit.arriving = segments[self.rank], memory.view(1 + n, n, -1)[1:, self.rank]
        if isinstance(unit, Table):
            values = [segment.view(-1, p.shape[1]) for segment in segments]
            numbers = share(self, torch.empty(len(values[0]), dtype=torch.int64), n)
            unit.every = list(zip(numbers, values, strict=True))
        return unit

    def check_places(self) -> None:
        super().check_places()
        for (name, p), version in zip(self.parameters, self._versions, strict=True):
            if p._version != version:
                raise UserError(
                    f"{name} was changed in place, and under shared_weights it is one memory for all ranks: each would "
                    "change it. Choose zero1."
                )

    def start_parts(self, unit: Unit) -> Any:
        if isinstance(unit, Table):
            own = unit.every[self.rank]
            own[0].fill_(-1)
            for all_rows, rows in zip(own, unit.rows, strict=True):
                all_rows[: len(rows)] = rows
        return self._announce(f"filled {unit.name}")

    def average_part(self, unit: Unit) -> torch.Tensor:
        if isinstance(unit, Table):
            return unit.average_rows(self.ranks)
        return unit.arriving.sum(dim=0)  # not into the rank's own segment, which is one of those that are read

    def agree(self, has: list[bool]) -> list[bool]:
        for unit in self.buckets:
            self.end(unit)
        return [users > 0 for users in self.count(has)]  # a meeting, too: now all ranks have averaged

    def before_step(self) -> None:
        super().before_step()
        self._meet("come to the step")

    def after_step(self) -> None:
        self._meet("stepped")

    def settle(self) -> None:
        super().settle()
        self._meet("settled")  # before a rank loads other weights, all have come here, and read theirs no more

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        self._versions = [p._version for _, p in self.parameters]
        super().load_whole(state)

    def _announce(self, done: str) -> Any:
        """Tell all ranks that this one has done something. Wait for it to know that all have."""
        with self.ledger.naming(f"ranks that have {done}", AGREEMENT):
            return dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)

    def _meet(self, done: str) -> None:
        """Wait until all ranks have done something."""
        self._announce(done).wait()
