"""ZeRO stage 1 between hosts: of large embeddings the rows that were looked up travel, and no weights at all."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cos598d.comm.exchange import WeightGather
from cos598d.errors import UsageError
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.parts.low_bytes import LowBytes, changed_in_forward, is_packed
from cos598d.strategies.parts.row_gradients import LEAST_BYTES, RowGradients, row_embeddings
from cos598d.strategies.parts.sharded_formulas import held_by_sparse_zero1, sent_by_sparse_zero1
from cos598d.strategies.parts.units import ReplicatedUnit, Unit
from cos598d.strategies.state import BUFFERS, WEIGHTS, ShardSlice, own_state_of
from cos598d.strategies.zero1 import Zero1, bucket_units
from cos598d.sync.buckets import Named
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.embeddings import why_no_rows

MOST_MB = (
    3.6  # of a bucket: a layer of MiniLM is three, so that the first part of it travels while the rest is computed
)


class SparseZero1(Zero1):
    """`zero1` whose large embeddings are replicated; what all ranks know of the weights does not travel.

    All but the embeddings is as in `zero1`, in buckets of 3.6 MiB at most: a reduce-scatter for each under backward,
    each rank's own step of its n-th, and an all-gather for each under the next forward (DeAR, Zhang et al., arXiv
    2302.12445).

    1. An embedding of half a MiB or more that only looks up rows has a sparse gradient: backward computes the rows of
       the batch's ids alone. Every rank sends its own rows to every other (`RowGradients`), and so has the whole sum.
    2. Every rank sends the sum of the squares of its parts of the gradients to every other: added up in order of rank
       they are the square of the global norm. That is one message to wait for, where an all-reduce has 2(n-1).
    3. Rank r steps its parts of the buckets, and sends 20 of a weight's 32 bits: the others, who know what it was, know
       the upper ones of a weight that has moved a little. The few that have moved further are sent too (`LowBytes`).
    4. Meanwhile every rank steps all rows of every such embedding: those that nobody looked up have a gradient of
       zeros, and move by momentum and weight decay as they should. The ranks compute the same from the same, so that
       no weight of an embedding travels.

    What is taken to be known must be: whoever changes weights between two steps changes them alike on all ranks. Where
    one rank's copy is changed alone, `zero1` would give the owners' weights to all; here upper bits and embeddings stay
    apart forever, and nobody notices before the replicas are compared (`--check_replicas`).

    Cost for weights of S bytes in B buckets, and E more in T embeddings of R rows together, of which this rank looked
    up u bytes: 2B + T calls; every rank sends (n-1)/n S of gradients, (n-1)/n S (20 + 48/k)/32 of weights, where there
    is room for one in k that has moved further (k = 512, and as little as 32 where steps are long), at most (n-1) u of
    rows and one more for each embedding, (n-1) R/8 to say which they are, and with clipping 8(n-1).
    `zero1` sends 2(n-1)/n (S + E). Memory: as `zero1` for S, and 0.8 S + S/n to send and receive weights in; of
    embeddings E of weights, E of gradients and, with AdamW, 2E of state on every rank (`held_by_sparse_zero1`), which
    steps E where `zero1` steps E/n. Choose it between hosts. The slower the links, the more it saves.

    `pack_gradients`: of a gradient 28.3 bits of 32 travel (`PackedReduceScatters`), and the sums have the same bits. To
    pack and unpack them takes the processor's time: choose it where the link is so slow that a bench says it pays.
    """

    uses = ("bucket_mb", "pack_gradients")
    gradients_kind = RowGradients

    @classmethod
    def check_options(cls, options: SyncOptions, backend: str) -> None:
        if options.pack_gradients and backend != "gloo":
            raise UsageError(
                f"--pack_gradients needs messages with tags, which the backend {backend} does not have. "
                "Leave it out, or give --backend gloo."
            )

    def units_of(self, model: nn.Module, parameters: Sequence[Named], ranks: int) -> list[Unit]:
        """Buckets of all but the embeddings whose rows travel, and after them one unit for each of those."""
        embeddings = row_embeddings(model)
        dense = [named for named in parameters if named[1] not in embeddings]
        looked_up = [(name, p) for name, p in reversed(parameters) if p in embeddings]
        small = replace(self.options, bucket_mb=min(self.options.bucket_mb, MOST_MB))
        units = bucket_units(model, dense, small, ranks)
        return units + [ReplicatedUnit(name, [(name, p)], ranks) for name, p in looked_up]

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        units = self.units_of(job.model, job.trainable, job.ranks)
        return held_by_sparse_zero1(job, units, self.options.pack_gradients)

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        units = self.units_of(job.model, job.trainable, job.ranks)
        return sent_by_sparse_zero1(job, units, self.find_unused_parameters, self.options.pack_gradients)

    def remark(self, model: nn.Module) -> str | None:
        """That there is no embedding whose rows it could leave out, and why."""
        if row_embeddings(model):
            return None
        why = why_no_rows(model, LEAST_BYTES) or "this model's has max_norm or scale_grad_by_freq"
        return f"sparse_zero1 leaves out rows of an embedding that nobody looks up, and has none to leave out: {why}"

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._packed: dict[Unit, LowBytes] = {}
        self._changing = changed_in_forward(model)
        module = super().attach(model, make_optimizer)
        # Whole on every rank: the optimizer's own words for the embeddings.
        self._tables = {name: part for name, part, _, unit, _ in self.pieces if isinstance(unit, ReplicatedUnit)}
        return module

    def hold(self, unit: Unit) -> torch.Tensor:
        if not isinstance(unit, ReplicatedUnit):
            return super().hold(unit)
        ((_, p),) = unit.parameters
        p.data = p.data.contiguous()
        return p.data.view(-1)

    def finish(self) -> None:
        # While the last sums are on their way. From here on nobody reads weights until the step, which under fp16 may
        # not come; those that no layer has asked for may still be under way.
        for packed in self._packed.values():
            packed.look()
        for unit, gather in self._gathers.items():
            if self.precision != "fp16" and unit not in self._under_way:
                gather.expect()
        super().finish()

    def forget_step(self) -> None:
        super().forget_step()
        self._send_what_is_expected()

    def _send_what_is_expected(self) -> None:
        """There was no step: the weights go as they were to the ranks that are ready for them."""
        if any(gather.is_expected for gather in self._gathers.values()):
            self.stepped()

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        every = squares.repeat(self.comm.world_size)
        with self.comm.composed("all_gather", squares, "squares of the gradient", purpose=AGREEMENT) as call:
            others = self.comm.others
            call.swap([(squares.view(1), other) for other in others], [(every[o : o + 1], o) for o in others])
        return every.sum()

    def step(self) -> bool:
        # Of what is stepped first the new weights travel while the rest is stepped.
        gradients = [part.grad for part in self._tables.values()]
        for part in self._tables.values():
            part.grad = None
        is_good = super().step()
        with self.phase("step"):
            if is_good:
                for part, gradient in zip(self._tables.values(), gradients, strict=True):
                    part.grad = gradient
                self.step_optimizer()
                self.optimizer.zero_grad(set_to_none=True)
        return is_good

    def make_gather(self, unit: Unit, weights: torch.Tensor) -> WeightGather:
        if not is_packed(unit, self._changing):
            return super().make_gather(unit, weights)
        self._packed[unit] = LowBytes(self.comm, unit.name, weights, unit.lengths, unit.weights_tag)
        return self._packed[unit]

    def weights_under_way(self) -> list[torch.Tensor]:
        return [tensor for packed in self._packed.values() for tensor in packed.tensors()]

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As every sharded one's, and in which form weights travel."""
        self.wait_for_weights()  # which may change that
        facts, tensors = super().own_state()
        return facts | {"forms": {unit.name: packed.forms for unit, packed in self._packed.items()}}, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_own_state(facts, tensors)
        with own_state_of(self.comm.rank):
            for unit, packed in self._packed.items():
                packed.forms = facts["forms"][unit.name]

    def state(self) -> Iterator[ShardSlice]:
        """As every sharded one's; what every rank remembers of an embedding is rank 0's to tell."""
        for piece in super().state():
            if self.comm.rank == 0 or piece.kind in (WEIGHTS, BUFFERS) or piece.name not in self._tables:
                yield piece

    def detach(self) -> None:
        self._send_what_is_expected()
        super().detach()
        self._tables, self._packed = {}, {}
