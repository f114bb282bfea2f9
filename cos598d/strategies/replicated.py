"""Whole replicas that average their gradients: the strategy for any gradient sync."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.records.conventions import STATE
from cos598d.strategies.base import MakeOptimizer, Module, Strategy
from cos598d.strategies.formula import (
    MemoryEstimate,
    TrafficEstimate,
    TrainingSpec,
    replicated_memory,
    sent_by_replicas,
)
from cos598d.strategies.memory import count_memory, state_tensors, tensors_in
from cos598d.strategies.precision import computing_in
from cos598d.strategies.state import WEIGHTS, FullTensor, StateLayout, own_state_of, put_into_model
from cos598d.sync.base import GradientSync
from cos598d.sync.options import DEFAULTS


class Replicated(Strategy):
    """Every rank holds all weights, all gradients and the complete optimizer state, and makes the same step.

    1. `attach` gives every rank rank 0's state.
    2. After `backward` on each rank's share of the batch, `finish` averages the gradients over the ranks with the sync.
    3. Every rank clips the average by its norm and steps by it, so the replicas stay equal.

    Cost per step: the sync's. Memory for weights of S bytes: with AdamW 2 S of state on every rank, and the buffers of
    the sync (`GradientSync.buffers`). At the peak, S of gradients in addition, or, if gradients move into the buffers
    as they arrive, only the largest gradient.

    sync_kind: the sync of a strategy that always uses its own; other strategies are given one.
    """

    sync_kind: type[GradientSync]

    def __init__(self, sync: GradientSync, precision: str = "fp32", comm: Communicator | None = None):
        """`sync` is constructed, but not attached yet; `precision` is one of PRECISIONS.

        Your own class may keep its `comm` under another name; then pass it here.
        """
        # Your own class need not keep the other arguments either.
        unused, options = getattr(sync, "find_unused_parameters", True), getattr(sync, "options", DEFAULTS)
        super().__init__(comm or sync.comm, unused, options, precision)
        self.sync = sync

    @property
    def replicas_equal(self) -> bool:
        return self.sync.replicas_equal

    def remark(self, model: nn.Module) -> str | None:
        return self.sync.remark(model) if self.comm.world_size > 1 else None

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self.model, self.layout = model, StateLayout(model, make_optimizer)
        self._parameters = list(model.parameters())
        self.optimizer = make_optimizer(model.named_parameters())
        return computing_in(self.precision, self.comm.device, self.sync.attach(model))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sync.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        self.sync.loss_scale = self.loss_scale
        # Gradients are averaged over ranks: with the factor n, the average is the global batch's gradient.
        (loss * (self.comm.world_size * self.loss_scale)).backward()
        separate_gradients(self._parameters)

    def finish(self) -> None:
        self.sync.finish()

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def step(self) -> bool:
        is_good = self.is_finite
        if self.scale.is_on:
            with self.phase("sync"):
                is_good = self.sync.agree_on_finite(is_good)
        with self.phase("step"):
            if is_good:  # else fp16 has overflowed
                self.optimizer.step()
            self.scale.update(is_good, self.comm.ledger.iteration)
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
        return replicated_memory(job, self.sync.buffers(job.tensors, self.options))

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        return sent_by_replicas(job, self.sync, self.precision)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As in the interface: the weights as after `settle`, though this rank's own do not change."""
        parts = self.sync.averages_weights and not self.sync.replicas_equal
        for name, parameter in self.model.named_parameters():
            whole: torch.Tensor = parameter
            if parts and parameter.requires_grad:
                mean = parameter.detach().clone()
                self.comm.all_reduce(mean, name, purpose=STATE)
                whole = mean.div_(self.comm.world_size)
            if self.comm.rank == 0:
                yield name, whole

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As in the interface: the sync's state, and the parts of this replica that differ between ranks."""
        facts, kept = self.sync.own_state()
        tensors = {f"sync/{name}": tensor for name, tensor in kept.items()} | super().own_state()[1]
        if not self.sync.replicas_equal:
            tensors |= {f"{WEIGHTS}/{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        if self._steps_alone:
            pieces = self.optimizer_state().pieces()
            tensors |= {f"optimizer/{piece.kind}/{piece.name}": piece.values for piece in pieces}
        return {"sync": facts, "scalars": self.scalars()}, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_own_state(facts, tensors)
        with own_state_of(self.comm.rank):
            self.load_scalars(facts["scalars"])  # replicas that drift apart do not share them
            optimizer_state = self.optimizer_state()
            if self._steps_alone:
                optimizer_state.forget()
            for key, tensor in tensors.items():
                part, _, name = key.partition("/")
                if part == WEIGHTS:
                    put_into_model(self.model, FullTensor(WEIGHTS, name, tensor))
                elif part == "optimizer":
                    kind, _, name = name.partition("/")
                    optimizer_state.put(FullTensor(kind, name, tensor))
            kept = {key.removeprefix("sync/"): tensor for key, tensor in tensors.items() if key.startswith("sync/")}
            self.sync.load_own_state(facts["sync"], kept)

    @property
    def own_is_lost(self) -> str | None:
        return self.sync.own_is_lost

    @property
    def never_kept(self) -> str | None:
        return self.sync.never_kept

    @property
    def _steps_alone(self) -> bool:
        """Whether this rank's optimizer state differs from rank 0's."""
        return self.comm.rank > 0 and (self.sync.averages_weights or not self.sync.replicas_equal)

    def detach(self) -> None:
        self.sync.detach()
        self._parameters = []


def separate_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each gradient memory of its own.

    Autograd may let two gradients share memory, as for a and b in a.view(24) + b.view(24). The next micro-batch's
    addition to one would then change the other as well. Scaling all of them, as clipping does, would scale it twice.
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
