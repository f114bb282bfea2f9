"""ZeRO stage 1 between hosts: of large embeddings, only looked-up gradient rows are sent, and no weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cos598d.comm.exchange import WeightGather
from cos598d.errors import UsageError
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.parts.low_bytes import LowBytes, changed_in_forward, is_packed
from cos598d.strategies.parts.row_gradients import LEAST_BYTES, PackedRowGradients, RowGradients, row_embeddings
from cos598d.strategies.parts.sharded_formulas import held_by_sparse_zero1, sent_by_sparse_zero1
from cos598d.strategies.parts.units import ReplicatedUnit, Unit
from cos598d.strategies.state import BUFFERS, WEIGHTS, ShardSlice, own_state_of
from cos598d.strategies.zero1 import Zero1, bucket_units
from cos598d.sync.buckets import Named
from cos598d.sync.options import SYNC_GROUP, SyncOptions
from cos598d.sync.parts.embeddings import why_no_rows
from cos598d.terminal.fields import flag

MOST_MB = 3.6  # of a bucket: MiniLM's layers have three buckets each, so the first is sent while the rest is computed


@dataclass(frozen=True)
class SparseZero1Options(SyncOptions):
    """The options of sparse_zero1. pack_gradients: whether it sends gradients in fewer bits, without loss."""

    pack_gradients: bool = flag(
        False,
        "send gradients in an eighth fewer bits without loss, for sparse_zero1",
        group=SYNC_GROUP,
    )


class SparseZero1(Zero1):
    """`zero1` with replicated large embeddings. Bits of weights that all ranks know already are not sent.

    All other parameters work as in `zero1`, in buckets of at most 3.6 MiB. Each has a reduce-scatter during backward,
    each rank's step of its n-th, and an all-gather during the next forward (DeAR, Zhang et al., arXiv 2302.12445).

    1. An embedding of at least half a MiB that only looks up rows has a sparse gradient: backward computes only the
       rows of the batch's ids. Every rank sends its own rows to every other (`RowGradients`), so each has the whole
       sum.
    2. Every rank sends the sum of squares of its parts of the gradients to every other. Added up in order of rank, they
       give the global norm. That is one message to wait for; an all-reduce has 2(n-1).
    3. Rank r steps its parts of the buckets, and sends 20 of each weight's 32 bits. The others have the old value, so
       they know the upper bits of a weight that has moved little. The few weights that have moved further are sent in
       full (`LowBytes`).
    4. Meanwhile every rank steps all rows of every such embedding. Rows that nobody looked up have a gradient of zeros,
       and move by momentum and weight decay. All ranks compute the same values, so no embedding weight is sent.

    All ranks must really have the same old weights: if you change weights between two steps, change them alike on all
    ranks. If only one rank's copy changes, `zero1` would send the owners' weights to all. Here upper bits and
    embeddings stay different forever, and only a comparison of the replicas detects it (`--check_replicas`).

    Cost for weights of S bytes in B buckets, and E more in T embeddings of R rows in total, of which this rank looked
    up u bytes: 2B + T calls. Every rank sends (n-1)/n S of gradients, and (n-1)/n S (20 + 48/k)/32 of weights. Here one
    in k weights may have moved further (k = 512, down to 32 if steps are long). It also sends at most (n-1) u of rows
    and one more for each embedding, (n-1) R/8 to identify them, and with clipping 8(n-1). `zero1` sends 2(n-1)/n (S +
    E). Memory: as `zero1` for S, and 0.8 S + S/n to send and receive weights in. Of embeddings, E of weights, E of
    gradients and, with AdamW, 2E of state on every rank (`held_by_sparse_zero1`). Every rank steps E, where `zero1`
    steps E/n. Choose it between hosts. The slower the links, the more it saves.

    `pack_gradients`: 28.3 of a gradient's 32 bits are sent (`PackedReduceScatters`), and the sums have the same bits.
    Packing takes CPU time. Choose it if a bench shows that your link is slow enough for it to pay.
    """

    options: SparseZero1Options
    options_kind = SparseZero1Options
    uses = ("bucket_mb", "pack_gradients")
    gradients_kind = RowGradients

    def choose(self) -> None:
        if self.options.pack_gradients:
            self.gradients_kind = PackedRowGradients

    @classmethod
    def check_options(cls, options: SyncOptions, backend: str) -> None:
        if SparseZero1Options.of(options).pack_gradients and backend != "gloo":
            raise UsageError(
                f"--pack_gradients needs messages with tags, which the backend {backend} does not have. "
                "Leave it out, or give --backend gloo."
            )

    def units_of(self, model: nn.Module, parameters: Sequence[Named], ranks: int) -> list[Unit]:
        """Buckets of everything except the embeddings sent by rows, then one unit for each of those."""
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
        """A sentence that there is no embedding whose rows it could leave out, and why."""
        if row_embeddings(model):
            return None
        why = why_no_rows(model, LEAST_BYTES) or "this model's has max_norm or scale_grad_by_freq"
        return f"sparse_zero1 can leave out embedding rows that nobody looks up, but has none to leave out: {why}"

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._packed: dict[Unit, LowBytes] = {}
        self._changing = changed_in_forward(model)
        module = super().attach(model, make_optimizer)
        # The optimizer's parameters for the embeddings, complete on every rank.
        self._tables = {name: part for name, part, _, unit, _ in self.pieces if isinstance(unit, ReplicatedUnit)}
        return module

    def hold(self, unit: Unit) -> torch.Tensor:
        if not isinstance(unit, ReplicatedUnit):
            return super().hold(unit)
        ((_, p),) = unit.parameters
        p.data = p.data.contiguous()
        return p.data.view(-1)

    def finish(self) -> None:
        # While the last sums are being sent. After this, nobody reads weights until the step, which fp16 may skip.
        # Weights that no layer has asked for may still be on their way.
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
        """Send the unchanged weights to the ranks that expect them, since there was no step."""
        if any(gather.is_expected for gather in self._gathers.values()):
            self.stepped()

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        every = squares.repeat(self.comm.world_size)
        with self.comm.composed("all_gather", squares, "squares of the gradient", purpose=AGREEMENT) as call:
            others = self.comm.others
            call.swap([(squares.view(1), other) for other in others], [(every[o : o + 1], o) for o in others])
        return every.sum()

    def step(self) -> bool:
        # The new weights of the first parameters are sent while the rest is stepped.
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
        """As in every sharded strategy, and the form in which weights are sent."""
        self.wait_for_weights()  # which may change that
        facts, tensors = super().own_state()
        return facts | {"forms": {unit.name: packed.forms for unit, packed in self._packed.items()}}, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_own_state(facts, tensors)
        with own_state_of(self.comm.rank):
            for unit, packed in self._packed.items():
                packed.forms = facts["forms"][unit.name]

    def state(self) -> Iterator[ShardSlice]:
        """As in every sharded strategy. Rank 0 yields the state of embeddings, which every rank has."""
        for piece in super().state():
            if self.comm.rank == 0 or piece.kind in (WEIGHTS, BUFFERS) or piece.name not in self._tables:
                yield piece

    def detach(self) -> None:
        self._send_what_is_expected()
        super().detach()
        self._tables, self._packed = {}, {}
