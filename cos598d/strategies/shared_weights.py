"""Weights that lie once in memory which the ranks of a host share; every rank steps its n-th of them where they lie."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, Sent, TrainingSpec
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.parts.cast_weights import CastWeights, linear_layers
from cos598d.strategies.parts.held import held_by_shared_weights
from cos598d.strategies.parts.sent import sent_by_shared_weights
from cos598d.strategies.parts.shared_gradients import COME, END, SharedGradients
from cos598d.strategies.parts.units import Unit
from cos598d.strategies.precision import DTYPES
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.state import FullTensor
from cos598d.strategies.zero1 import bucket_units
from cos598d.sync.buckets import Named
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.embeddings import large_embeddings


class SharedWeights(Sharded):
    """`zero1` for the ranks of one host: the weights lie once, in memory that all ranks map, and nothing travels.

    1. Buckets as `zero1` has them, each cut into n parts, of which part r is rank r's; but an embedding of a MiB or
       more that only looks up rows is one by itself, cut between rows. The weights of all buckets lie in shared memory,
       where every rank's model has them, and beside them n segments, one for each rank's gradients.
    2. When backward has computed a gradient, a hook copies it into the rank's own segment. Such an embedding's gradient
       is sparse: only the rows that the batch looked up are computed, and added to the segment's zeros. When all ranks
       have filled a bucket, rank r adds up part r, of an embedding the rows that some rank has marked
       (`SharedGradients`).
    3. After its sums rank r writes the squares of its parts into its segment, and waits for all others': added up in
       order of rank they are the global gradient's norm. By then all backwards are over, and nobody reads weights.
    4. The optimizer of rank r steps the pieces of parameters in part r where they lie, with the whole gradient of each,
       zeros too: rows that nobody looked up move by momentum and weight decay as they should. When all ranks have
       stepped, every rank has the new weights.
    5. Under bf16 and fp16 the linear layers' weights lie beside these in half precision as well, once for all: rank r
       casts part r after its step, and nobody does in forward (`CastWeights`).

    Nobody but the optimizer may change weights: a forward that does is refused where it can be told (`max_norm`).

    Cost for a gradient of S bytes: nothing is sent, and no collective is called, but to agree on unused parameters.
    Beside what its optimizer does to S/n, every rank reads (2 + 2/n) S of memory and writes (1 + 2/n) S: S and S to
    copy gradients, S and S/n to add them up, S/n for the norm, S/n and S/n to clip; of such an embedding only the rows
    that were looked up count. A rank waits for the others three times a step.
    Memory: (n+1) S for all ranks of the host together, where `zero1` takes 2n S, and with AdamW 2S/n of state on each;
    within a step the largest gradient; up to S/2 for all together in half precision (`held_by_shared_weights`).
    Choose it when all ranks share a host: it copies, sends and computes less than any other exact strategy there.
    """

    uses = ("bucket_mb",)
    shards = ("optimizer",)
    one_host = shares_memory = True

    def make_gradients(self, find_unused_parameters: bool) -> SharedGradients:
        self._shared = SharedGradients(
            self.comm, find_unused_parameters, self.options, self.make_units, True, self.is_complete
        )
        self._shared.cast_to = DTYPES[self._precision]
        return self._shared

    def make_units(self, parameters: Sequence[Named]) -> list[Unit]:
        return shared_units(self._model, parameters, self.options, self.comm.world_size)

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        units = shared_units(job.model, job.trainable, self.options, job.ranks)
        halves = linear_layers(job.model) if DTYPES[self._precision] else {}
        return held_by_shared_weights(job, units, large_embeddings(job.model), halves)

    def expected_sent(self, job: TrainingSpec) -> Sent:
        units = shared_units(job.model, job.trainable, self.options, job.ranks)
        return sent_by_shared_weights(job, units, self.may_be_unused)

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._meetings = 0  # so far: the ranks' flags say which one they have come to
        self._has_come = False  # to this step: the ranks do not read weights until it ends
        self._own: dict[Unit, torch.Tensor] = {}
        module = super().attach(model, make_optimizer)
        self._copies = CastWeights(model, self.comm.rank, self._shared.copies, self._shared.receive)
        self._cast()
        self._meet(END)
        return module

    def hold(self, unit: Unit) -> torch.Tensor:
        # A rank that is alone has one piece of memory for a unit, its segment.
        is_alone = self.comm.world_size == 1
        weights = unit.empty(unit.elements) if is_alone else self._shared.segments.result[unit.number]
        for view, (_, p) in zip(unit.views(weights), unit.parameters, strict=True):
            p.data = view.copy_(p.data)  # every rank writes rank 0's values
        self._own[unit] = unit.parts(weights)[self.comm.rank]
        return self._own[unit]

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        segments, place = self._shared.segments, self._shared.step_place
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

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._model.named_parameters() if self.comm.rank == 0 else ())

    def put_weights(self, name: str, whole: torch.Tensor) -> None:
        self._model.get_parameter(name).data.copy_(whole)  # every rank writes the same

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        self._meet(COME)
        super().load_state(wholes)
        self._cast()
        self._meet(END)

    def memory(self) -> dict[str, int]:
        """As the contract says; of what all ranks share, this rank's part of the weights, and its own segment."""
        frozen = [p.data for p in self._model.parameters() if not p.requires_grad]
        held = count_memory(parameters=frozen, optimizer=state_tensors(self.optimizer))
        return {
            "parameters": held["parameters"] + _bytes([*self._own.values(), *self._copies.own.values()]),
            "gradients": _bytes(self._shared.gradient_tensors()),
            "optimizer": held["optimizer"],
            "buckets": _bytes(self._shared.bucket_tensors()),
        }

    def detach(self) -> None:
        """As every strategy's. From then on every rank has weights of its own."""
        for p in self._model.parameters():
            if p.requires_grad:
                p.data = p.data.clone()
        for stepped in self.held.values():
            stepped.parameter.data = stepped.parameter.data.clone()
        self._copies.detach()
        self._own = {}
        super().detach()

    def _cast(self) -> None:
        """This rank's parts of the weights have changed, and so are to be their copies in half precision."""
        for unit, own in self._own.items():
            self._copies.refresh(unit, own)

    def _come(self) -> None:
        """Wait until all ranks have come to this step: whatever they read of the weights they have read."""
        if not self._has_come:
            self._meet(COME)
            self._has_come = True

    def _meet(self, stage: str) -> None:
        """Wait until all ranks are here. Between two times with one stage they have to wait for each other elsewhere: a
        flag that is raised again has not been seen by all before."""
        self._meetings += 1
        segments, place = self._shared.segments, self._shared.step_place
        segments.raise_flag(stage, place, self._meetings)
        segments.wait(stage, place, self._meetings)


def shared_units(model: nn.Module, parameters: Sequence[Named], options: SyncOptions, ranks: int) -> list[Unit]:
    """`bucket_units` of all but the large embeddings, and after them a unit for each of those, cut between rows."""
    embeddings = large_embeddings(model)
    dense = [named for named in parameters if named[1] not in embeddings]
    looked_up = [(name, p) for name, p in reversed(parameters) if p in embeddings]
    units = bucket_units(model, dense, options, ranks)
    return units + [Unit(name, [(name, p)], ranks, width=p.shape[1]) for name, p in looked_up]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
