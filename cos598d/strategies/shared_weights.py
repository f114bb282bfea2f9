"""Weights stored once, in memory that the ranks of a host share; every rank steps its n-th of them in place."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.parts.cast_weights import CastWeights, linear_layers
from cos598d.strategies.parts.sharded_formulas import held_by_shared_weights, sent_by_shared_weights
from cos598d.strategies.parts.shared_gradients import COME, END, SharedGradients
from cos598d.strategies.parts.units import Unit
from cos598d.strategies.precision import DTYPES
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.state import FullTensor
from cos598d.strategies.zero1 import bucket_units
from cos598d.sync.buckets import Named
from cos598d.sync.parts.embeddings import large_embeddings


class SharedWeights(Sharded):
    """`zero1` for the ranks of one host: the weights are stored once, in memory that all ranks map.

    1. Buckets are as in `zero1`, each split into n parts; part r belongs to rank r. But an embedding of at least one
       MiB that only looks up rows is a bucket by itself, split between rows. The weights of all buckets are in shared
       memory, where every rank's model uses them. Next to them are n segments, one for each rank's gradients.
    2. When backward has computed a gradient, a hook copies it into the rank's own segment. Such an embedding's gradient
       is sparse: only the rows that the batch looked up are computed, and added to the segment's zeros. When all ranks
       have filled a bucket, rank r adds up part r; of an embedding, only the rows that some rank has marked
       (`SharedGradients`).
    3. After its sums, rank r writes the squares of its parts into its segment, and waits for the others'. Added up in
       order of rank, they are the global gradient's norm. By then all backwards are over, and nobody reads weights.
    4. The optimizer of rank r steps the pieces of parameters in part r in place, with their complete gradients. These
       include zeros: rows that nobody looked up still move by momentum and weight decay. When all ranks have stepped,
       every rank has the new weights.
    5. Under bf16 and fp16, shared memory also has the linear layers' weights in half precision, once for all ranks.
       Rank r casts part r after its step, and no forward casts (`CastWeights`).

    Only the optimizer may change weights. A forward that does is refused if it can be detected (`max_norm`).

    Cost for a gradient of S bytes: nothing is sent, and no collective is called, except to agree on unused parameters.
    In addition to its optimizer's work on S/n, every rank reads (2 + 2/n) S of memory and writes (1 + 2/n) S: S and S
    to copy gradients, S and S/n to add them up, S/n for the norm, S/n and S/n to clip. Of such an embedding, only rows
    that were looked up count. A rank waits for the others three times per step. Memory: (n+1) S for all ranks of the
    host together, compared with 2n S in `zero1`, and with AdamW 2S/n of state on each. Within a step also the largest
    gradient; up to S/2 for all ranks together in half precision (`held_by_shared_weights`). Choose it when all ranks
    share a host: it copies, sends and computes less than any other exact strategy there.
    """

    uses = ("bucket_mb",)
    shards = ("optimizer",)
    one_host = shares_memory = True
    gradients_kind = SharedGradients
    keeps_gradients = True
    _gradients: SharedGradients

    def make_gradients(self) -> SharedGradients:
        gradients = super().make_gradients()
        assert isinstance(gradients, SharedGradients)
        gradients.cast_to = DTYPES[self.precision]
        return gradients

    def units_of(self, model: nn.Module, parameters: Sequence[Named], ranks: int) -> list[Unit]:
        """Buckets of everything except the large embeddings, then a unit for each of those, split between rows."""
        embeddings = large_embeddings(model)
        dense = [named for named in parameters if named[1] not in embeddings]
        looked_up = [(name, p) for name, p in reversed(parameters) if p in embeddings]
        units = bucket_units(model, dense, self.options, ranks)
        return units + [Unit(name, [(name, p)], ranks, width=p.shape[1]) for name, p in looked_up]

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        halves = linear_layers(job.model) if DTYPES[self.precision] else {}
        units = self.units_of(job.model, job.trainable, job.ranks)
        return held_by_shared_weights(job, units, large_embeddings(job.model), halves)

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        return sent_by_shared_weights(
            job, self.units_of(job.model, job.trainable, job.ranks), self.find_unused_parameters
        )

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._meetings = 0  # so far; the ranks' flags hold this number
        self._has_come = False  # all ranks have reached this step, so none reads weights until it ends
        self._own: dict[Unit, torch.Tensor] = {}
        module = super().attach(model, make_optimizer)
        self._copies = CastWeights(model, self.comm.rank, self._gradients.copies, self._gradients.receive)
        self._cast()
        self._meet(END)
        return module

    def hold(self, unit: Unit) -> torch.Tensor:
        # A single rank has one piece of memory for a unit: its segment.
        is_alone = self.comm.world_size == 1
        weights = unit.empty(unit.elements) if is_alone else self._gradients.segments.result[unit.number]
        for view, (_, p) in zip(unit.views(weights), unit.parameters, strict=True):
            p.data = view.copy_(p.data)  # every rank writes the same values, rank 0's
        self._own[unit] = unit.parts(weights)[self.comm.rank]
        return self._own[unit]

    def finish(self) -> None:
        self._go_on()
        super().finish()

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        self._go_on()
        segments, place = self._gradients.segments, self._gradients.step_place
        segments.own[place].copy_(squares)
        self._come()
        every = segments.every[place] or segments.own[place : place + 1]
        return torch.stack([number.squeeze() for number in every]).sum()

    def step(self) -> bool:
        with self.phase("sync"):
            self._come()
        is_good = super().step()
        self._has_come = False
        return is_good

    def stepped(self) -> None:
        self._cast()
        self._meet(END)

    def forget_step(self) -> None:
        super().forget_step()
        self._has_come = False

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        self._meet(COME)
        super().load_state(wholes)
        self._cast()
        self._meet(END)

    def memory(self) -> dict[str, int]:
        """As in the interface. Of shared memory it counts this rank's part of the weights, and its own segment."""
        frozen = [p.data for p in self.model.parameters() if not p.requires_grad]
        held = count_memory(parameters=frozen, optimizer=state_tensors(self.optimizer))
        return {
            "parameters": held["parameters"] + _bytes([*self._own.values(), *self._copies.own.values()]),
            "gradients": _bytes(self._gradients.gradient_tensors()),
            "optimizer": held["optimizer"],
            "buckets": _bytes(self._gradients.bucket_tensors()),
        }

    def detach(self) -> None:
        """As in every strategy. After it, every rank has weights of its own."""
        for p in self.model.parameters():
            if p.requires_grad:
                p.data = p.data.clone()
        for stepped in self.held.values():
            stepped.parameter.data = stepped.parameter.data.clone()
        self._copies.detach()
        self._own = {}
        super().detach()

    def _cast(self) -> None:
        """Update the half-precision copies of this rank's parts of the weights, which have changed."""
        for unit, own in self._own.items():
            self._copies.refresh(unit, own)

    def _come(self) -> None:
        """Wait until all ranks have reached this step, and so have read all the weights they need."""
        if not self._has_come:
            self._meet(COME)
            self._has_come = True

    def _go_on(self) -> None:
        """Before a second norm or backward in a step: wait until all ranks have read the previous results."""
        if self._has_come:
            self._meet(END)
            self._has_come = False

    def _meet(self, stage: str) -> None:
        """Wait until all ranks are here. Between two calls with the same stage, ranks must wait for each other
        elsewhere. Otherwise a flag could be raised again before all ranks have seen it."""
        self._meetings += 1
        segments, place = self._gradients.segments, self._gradients.step_place
        segments.raise_flag(stage, place, self._meetings)
        segments.wait(stage, place, self._meetings)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
