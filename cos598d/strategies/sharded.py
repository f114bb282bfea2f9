"""The common base of sharded strategies: an optimizer of pieces, a norm over shards, and the memory held."""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.base import MakeOptimizer, Module, Strategy
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.parts.gradients import ShardedGradients
from cos598d.strategies.parts.row_steps import RowSteps
from cos598d.strategies.parts.units import Unit
from cos598d.strategies.precision import computing_in
from cos598d.strategies.state import FullTensor, OptimizerState, StateLayout, Stepped, own_state_of
from cos598d.sync.buckets import Named


class Sharded(Strategy):
    """A replica whose optimizer steps one n-th of the weights: this rank's part of each unit.

    The optimizer gets the pieces of parameters in this rank's parts, as one-dimensional parameters under the model's
    names. So it must treat every element by itself, as SGD, Adam and AdamW do. LAMB, Adafactor and Muon do not work:
    they use whole matrices, or norms of them.

    A subclass defines the units and where their weights are stored: `units_of`, `hold`, `stepped` and, if a rank has no
    whole weights, `whole_weights` and `put_weights`.

    gradients_kind: the class that sums the gradients of the units. keeps_gradients: its argument `keeps`.
    """

    gradients_kind: type[ShardedGradients] = ShardedGradients
    keeps_gradients = False

    def __init_subclass__(cls) -> None:
        """Raise TypeError, on import, for a strategy that lacks a required part."""
        for part in ("units_of", "hold", "stepped"):
            if getattr(cls, part) is getattr(Sharded, part):
                raise TypeError(f"the strategy {cls.__name__} has no {part}. Write it, as `Sharded` describes.")

    @abstractmethod
    def units_of(self, model: nn.Module, parameters: Sequence[Named], ranks: int) -> list[Unit]:
        """Units with each trainable parameter once, in the order in which their gradients are expected."""

    def make_gradients(self) -> ShardedGradients:
        """The object that sums the gradients of the model's units."""
        return self.gradients_kind(
            self.comm,
            self.find_unused_parameters,
            self.options,
            lambda parameters: self.units_of(self.model, parameters, self.comm.world_size),
            self.keeps_gradients,
            self.is_complete,
        )

    @abstractmethod
    def hold(self, unit: Unit) -> torch.Tensor:
        """Store the unit's weights as this strategy keeps them. Return this rank's part of them."""

    @abstractmethod
    def stepped(self) -> None:
        """Called after the optimizer has changed this rank's parts."""

    def sum_over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        """The sum of one number per rank."""
        self.comm.all_reduce(squares, "squares of the gradient", purpose=AGREEMENT)
        return squares

    def weights_under_way(self) -> list[torch.Tensor]:
        """The tensors with weights in addition to the model's parameters and this rank's parts."""
        return []

    def is_complete(self, unit: Unit) -> None:
        """Called when the last of the unit's gradients of this backward is ready."""

    def wait_for_weights(self) -> None:
        """Block until weights that are being sent to this rank have arrived."""

    def catch_up(self) -> None:
        """Make the remaining calls that other ranks' backward waits for, after an exception has ended this rank's."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank's model has all weights now, once `wait_for_weights` has returned."""
        return True

    @property
    def gradients(self) -> ShardedGradients:
        """The object that sums the gradients, between `attach` and `detach`."""
        return self._gradients

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self.model, self.layout = model, StateLayout(model, make_optimizer)
        self._gradients = self.make_gradients()
        self._gradients.attach(model)  # rank 0's state for all
        # For each piece: its parameter's name, the piece, the parameter, its unit, and its slice of the unit's part.
        self.pieces: list[tuple[str, nn.Parameter, nn.Parameter, Unit, slice]] = []
        self.held: dict[str, Stepped] = {}  # this rank's pieces, by name
        for unit in self._gradients.units:
            own = self.hold(unit)
            for piece in unit.pieces(self.comm.rank):
                place = slice(piece.begin, piece.end)
                part = nn.Parameter(own[place])
                self.pieces.append((piece.name, part, piece.parameter, unit, place))
                self.held[piece.name] = Stepped(piece.name, tuple(piece.parameter.shape), piece.offset, part)
        is_laid = "parameters" not in self.shards  # else a layer's weights have other memory whenever they are gathered
        self._laid = [(name, p, p.data_ptr()) for name, p in self._gradients.parameters if is_laid]
        order = {name: number for number, (name, _) in enumerate(self._gradients.parameters)}
        self.pieces.sort(key=lambda piece: order[piece[0]])
        self.make_optimizer(make_optimizer)
        return computing_in(self.precision, self.comm.device, model)

    def make_optimizer(self, make: MakeOptimizer) -> None:
        """Have an optimizer that `make` makes step this rank's pieces."""
        self.layout.make_optimizer = make
        self.optimizer = make([(name, part) for name, part, *_ in self.pieces])
        self._row_steps = {
            unit: RowSteps(self.optimizer, part, parameter.shape[1])
            for _, part, parameter, unit, _ in self.pieces
            if parameter in self._gradients.embeddings
        }

    def check_memory(self) -> None:
        """Raise UserError if a weight is no longer where its shards are: a step would not reach the model."""
        for name, p, place in self._laid:
            if p.data_ptr() != place:
                raise UserError(
                    f"{name} has other memory than its shards, since something has replaced its tensor, as .to() may. "
                    "Change weights in place, move the model before parallelize, or call that again."
                )

    def no_sync(self) -> AbstractContextManager[None]:
        return self._gradients.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        # The sum over the ranks is the gradient of the global batch's mean, so nothing is divided.
        (loss * self._loss_factor).backward()

    def finish(self) -> None:
        self._gradients.finish()
        for _, part, parameter, unit, place in self.pieces:
            part.grad = self._gradients.shard(unit)[place] if self._gradients.is_used[parameter] else None

    def clip(self, max_norm: float) -> torch.Tensor | None:
        if self.scale.is_on:
            self._gradients.scale(1 / self._loss_factor)
        if not max_norm and not self.scale.is_on:
            return None
        squares = self._gradients.squares()
        # Every element is in one rank's part, so the sum over ranks covers the whole gradient.
        norm = self.sum_over_ranks(squares).sqrt()
        if self.scale.is_on:
            self.is_finite = math.isfinite(norm)
        if not max_norm:
            return None
        self._gradients.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
        return norm

    def step(self) -> bool:
        is_good = self.is_finite  # the norm is the same on every rank, so all ranks skip the same steps
        with self.phase("step"):
            if is_good:
                self.step_optimizer()
            self.scale.update(is_good, self.comm.ledger.iteration)
            self.optimizer.zero_grad(set_to_none=True)
            self._gradients.forget()
        with self.phase("sync"):
            if is_good:
                self.stepped()
        return is_good

    def step_optimizer(self) -> None:
        """Step the parameters that have a gradient."""
        with contextlib.ExitStack() as stack:
            for unit, row_steps in self._row_steps.items():
                stack.enter_context(row_steps.alone(self._gradients.rows(unit)))
            self.optimizer.step()

    def forget_step(self) -> None:
        """Drop the gradients of a step that an exception has interrupted, at the same point on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        self._gradients.forget()

    def settle(self) -> None:
        self._gradients.settle()

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        super().load_state(wholes)
        self.state_has_changed()

    def load_optimizer(self, wholes: Iterable[FullTensor]) -> None:
        """Load the optimizer state that this rank steps, and nothing else."""
        state = self.optimizer_state()
        state.forget()
        for whole in wholes:
            state.put(whole)
        self.state_has_changed()

    def state_has_changed(self) -> None:
        """Search for moved rows again, because the optimizer's state has changed without a step."""
        for row_steps in self._row_steps.values():
            row_steps.forget()

    def optimizer_state(self) -> OptimizerState:
        return OptimizerState(self.optimizer, self.held.values())

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As in the interface: the buffers, and the order in which the units start, seen only in the ledger's rows."""
        return {"order": self._gradients.order}, super().own_state()[1]

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_own_state(facts, tensors)
        with own_state_of(self.comm.rank):
            self._gradients.order = facts["order"]

    @property
    def _loss_factor(self) -> float:
        """The factor of losses. Under fp16 it includes the number of ranks, as it does when gradients are averaged. So
        the same steps overflow, and are skipped, under every strategy."""
        return self.loss_scale * self.comm.world_size if self.scale.is_on else 1.0

    def detach(self) -> None:
        self._gradients.detach()
        self.pieces, self.held, self._row_steps, self._laid = [], {}, {}, []
        self.optimizer.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, int]:
        parameters = [p.data for p in self.model.parameters()] + [part.data for _, part, *_ in self.pieces]
        parameters += self.weights_under_way()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return count_memory(
            parameters=parameters,
            gradients=gradients + self._gradients.gradient_tensors(),
            optimizer=state_tensors(self.optimizer),
            buckets=self._gradients.bucket_tensors(),
        )
