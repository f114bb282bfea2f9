"""Whole replicas that average their gradients: any gradient sync as a strategy."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, Sent, TrainingSpec, replicated_memory
from cos598d.strategies.loss_scale import LossScale
from cos598d.strategies.memory import count_memory, state_tensors, tensors_in
from cos598d.strategies.precision import computing_in
from cos598d.strategies.replicated_state import ReplicatedState
from cos598d.strategies.sent import sent_by_replicas
from cos598d.strategies.state import StateLayout
from cos598d.sync.base import GradientSync
from cos598d.sync.options import DEFAULTS


class Replicated(ReplicatedState):
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
