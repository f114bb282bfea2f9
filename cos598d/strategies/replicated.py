"""Whole replicas that average their gradients: any gradient sync as a strategy."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.records.conventions import STATE
from cos598d.strategies.base import MakeOptimizer, Module, Strategy
from cos598d.strategies.formula import Held, MemoryEstimate, Sent, TrainingSpec, largest
from cos598d.strategies.loss_scale import LossScale
from cos598d.strategies.memory import count_memory, state_tensors, tensors_in
from cos598d.strategies.precision import computing_in
from cos598d.strategies.sent import sent_by_replicas
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
from cos598d.sync.cost.memory import Buffers
from cos598d.sync.options import DEFAULTS


class Replicated(Strategy):
    """Every rank holds all weights, all gradients and the optimizer's whole state, and makes the same step.

    1. `attach` gives every rank rank 0's state.
    2. `backward` on each rank's share of the batch, `finish`: the sync averages the gradients over the ranks.
    3. Every rank clips the average by its norm and steps by it, so that the replicas stay equal.

    Cost a step: what the sync says. Memory for weights of S bytes: with AdamW 2 S of state on every rank, and whatever
    buffers the sync keeps (`GradientSync.buffers`); at the peak S of gradients beside them, or, where gradients move
    into the buffers as they come, the largest gradient alone.
    """

    def __init__(self, sync: GradientSync, precision: str = "fp32", comm: Communicator | None = None):
        """`sync` is made, and not attached yet; `precision` is one of PRECISIONS.

        A class of a user's own may keep `comm`, with which it was made, under another name: then it is given here.
        """
        self.sync = sync
        self._comm = comm or sync.comm
        self._precision = precision
        self._scale = LossScale(is_on=precision == "fp16")
        self._is_finite = True
        self._parameters: list[nn.Parameter] = []

    @property
    def replicas_equal(self) -> bool:
        return self.sync.replicas_equal

    @property
    def loss_scale(self) -> float:
        return self._scale.value

    def remark(self, model: nn.Module) -> str | None:
        return self.sync.remark(model) if self._comm.world_size > 1 else None

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self._parameters, self._model = list(model.parameters()), model
        self._contents = StateLayout(model, make_optimizer)
        self.optimizer = make_optimizer(model.named_parameters())
        return computing_in(self._precision, self._comm.device, self.sync.attach(model))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sync.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        self.sync.loss_scale = self.loss_scale
        # Gradients are averaged over ranks: times n, the average is the global batch's gradient.
        (loss * (self._comm.world_size * self.loss_scale)).backward()
        separate_gradients(self._parameters)

    def finish(self) -> None:
        self.sync.finish()

    def clip(self, max_norm: float) -> torch.Tensor | None:
        self._is_finite = self._scale.unscale(self._parameters)
        if not max_norm:
            return None
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def step(self) -> bool:
        is_good = self._is_finite
        if self._scale.is_on:
            with self.phase("sync"):
                is_good = self.sync.agree_on_finite(is_good)
        with self.phase("step"):
            if is_good:  # else fp16 overflowed
                self.optimizer.step()
            self._scale.update(is_good, self._comm.ledger.iteration)
            self.optimizer.zero_grad(set_to_none=True)
        with self.phase("sync"):
            if is_good:
                self.sync.after_step()
            else:
                self.sync.forget_step()
        return is_good

    def settle(self) -> None:
        self.sync.settle()

    def memory(self) -> dict[str, int]:
        held = count_memory(
            parameters=self._parameters,
            gradients=[p.grad for p in self._parameters if p.grad is not None],
            optimizer=state_tensors(self.optimizer),
            buckets=tensors_in(self.sync),
        )
        return held | {"buckets": held["buckets"] + self.sync.hidden_bytes()}

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        return replicated_memory(job, self.sync.buffers(job.tensors, getattr(self.sync, "options", DEFAULTS)))

    def expected_sent(self, job: TrainingSpec) -> Sent:
        return sent_by_replicas(job, self.sync, self._precision)

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

    def detach(self) -> None:
        self.sync.detach()
        self._parameters = []


def separate_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each gradient memory of its own.

    Autograd may leave two in one, as for a and b in a.view(24) + b.view(24). What is then added to one, in the next
    micro-batch, is added to the other as well, and what scales all of them, as clipping does, scales it twice.
    """
    spans = []
    for p in parameters:
        if p.grad is not None and p.grad.layout == torch.strided:
            spans.append((p.grad.data_ptr(), p.grad.nbytes, p))
    end = 0
    for begin, size, p in sorted(spans, key=lambda span: span[0]):
        if begin < end and p.grad is not None:
            p.grad = p.grad.clone()
        end = max(end, begin + size)


def replicated_memory(job: TrainingSpec, buffers: Buffers, state: int | None = None) -> MemoryEstimate:
    """What whole replicas hold: all weights and their state (or so many bytes of it), gradients until the step is made,
    and these buffers."""
    if buffers.unsaid:
        return MemoryEstimate(unsaid=buffers.unsaid)
    state = job.state(job.weights, len(job.trainable)) if state is None else state
    states = {"parameters": job.weights + job.frozen, "optimizer": state}

    def held(gradients: int, in_buffers: int = 0) -> Held:
        """With so many bytes of gradients, of which some are views of the buffers."""
        return states | {"gradients": gradients, "buckets": buffers.bytes - in_buffers}

    # A gradient is added to the one that is there only when it is whole.
    moments = [held(job.weights + (max(t.bytes for t in job.tensors) if job.passes > 1 else 0))]
    if buffers.at_once and buffers.groups:
        moments = moments if job.passes > 2 else [held(job.weights)] if job.passes > 1 else []
        group_of = {tensor: place for place, group in enumerate(buffers.groups) for tensor in group}
        sizes = [sum(tensor.bytes for tensor in group) for group in buffers.groups]
        touched: dict[int, int] = {}
        waiting = job.weights if job.passes > 1 else 0  # of earlier passes, in their own memory
        for tensor in reversed(job.tensors):
            moments.append(held(sum(touched.values()) + waiting + tensor.bytes, sum(touched.values())))
            waiting -= tensor.bytes if job.passes > 1 else 0
            touched[group_of[tensor]] = sizes[group_of[tensor]]
        moments.append(held(sum(touched.values()), sum(touched.values())))
    return MemoryEstimate(held(0), largest(moments))
