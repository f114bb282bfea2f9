"""The state of whole replicas, as checkpoints save it and other strategies load it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.records.conventions import STATE
from cos598d.strategies.base import Strategy
from cos598d.strategies.loss_scale import LossScale
from cos598d.strategies.state import (
    WEIGHTS,
    FullTensor,
    OptimizerState,
    ShardSlice,
    StateLayout,
    buffer_pieces,
    load_own_buffers,
    own_buffers,
    own_state_of,
    put_into_model,
    stepped_whole,
)
from cos598d.sync.base import GradientSync


class ReplicatedState(Strategy):
    """What of a replica is saved: rank 0's weights, buffers and optimizer, and of each rank what is only its own."""

    sync: GradientSync
    _comm: Communicator
    _model: nn.Module
    _scale: LossScale
    _contents: StateLayout

    def state(self) -> Iterator[ShardSlice]:
        for name, parameter in self._model.named_parameters():
            weights = self._as_one_model(name, parameter)
            if self._comm.rank == 0:
                yield ShardSlice.of_whole(WEIGHTS, name, weights)
        if self._comm.rank == 0:
            yield from buffer_pieces(self._model)
        if self._comm.rank == 0 or "optimizer" in self.shards:
            yield from self.remembered().pieces()

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        remembered = self.remembered()
        for whole in self._contents.checked(wholes):
            if not put_into_model(self._model, whole):
                remembered.put(whole)

    def scalars(self) -> dict[str, Any]:
        return self._scale.state()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        self._scale.load(scalars)

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As the contract says: what the sync keeps, and what of this replica is not the others'."""
        facts, kept = self.sync.own_state()
        tensors = {f"sync/{name}": tensor for name, tensor in kept.items()} | own_buffers(self._comm, self._model)
        if not self.sync.replicas_equal:
            tensors |= {
                f"{WEIGHTS}/{name}": p.detach() for name, p in self._model.named_parameters() if p.requires_grad
            }
        if self._steps_alone:
            tensors |= {f"optimizer/{piece.kind}/{piece.name}": piece.values for piece in self.remembered().pieces()}
        return {"sync": facts, "scalars": self.scalars()}, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        with own_state_of(self._comm.rank):
            self.load_scalars(facts["scalars"])  # which replicas that drift apart do not share
            load_own_buffers(self._model, tensors)
            remembered = self.remembered()
            if self._steps_alone:
                remembered.forget()
            for key, tensor in tensors.items():
                part, _, name = key.partition("/")
                if part == WEIGHTS:
                    put_into_model(self._model, FullTensor(WEIGHTS, name, tensor))
                elif part == "optimizer":
                    kind, _, name = name.partition("/")
                    remembered.put(FullTensor(kind, name, tensor))
            kept = {key.removeprefix("sync/"): tensor for key, tensor in tensors.items() if key.startswith("sync/")}
            self.sync.load_own_state(facts["sync"], kept)

    @property
    def own_is_lost(self) -> str | None:
        return self.sync.own_is_lost

    @property
    def never_kept(self) -> str | None:
        return self.sync.never_kept

    def remembered(self) -> OptimizerState:
        """What this rank's optimizer remembers, by the model's names."""
        return OptimizerState(self.optimizer, stepped_whole(self._model.named_parameters()))

    @property
    def _steps_alone(self) -> bool:
        """Whether this rank's optimizer remembers another thing than rank 0's."""
        return self._comm.rank > 0 and (self.sync.averages_weights or not self.sync.replicas_equal)

    def _as_one_model(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter as `settle` would make it, this rank's own left alone."""
        if not parameter.requires_grad or self.sync.replicas_equal or not self.sync.averages_weights:
            return parameter
        mean = parameter.detach().clone()
        self._comm.all_reduce(mean, name, purpose=STATE)
        return mean.div_(self._comm.world_size)
