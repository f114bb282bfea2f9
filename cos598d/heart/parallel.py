"""The one door: a model and an optimizer that all ranks train together. The training loop uses it as any script does."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.heart.comm.ledger import Ledger
from cos598d.heart.state import load_optimizer, optimizer_pieces
from cos598d.heart.sync import get_sync
from cos598d.heart.sync.base import GradientSync, Options
from cos598d.records.conventions import AGREEMENT


def parallelize(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    sync: str | type[GradientSync] = "bucketed",
    *,
    group: dist.ProcessGroup | None = None,
    ledger: Ledger | None = None,
    **options: Any,
) -> tuple["Parallel", torch.optim.Optimizer]:
    """Wrap a model and make its optimizer, so that all ranks train it together. Every rank calls it.

    make_optimizer: called once with the model's parameters; it may make groups of them. sync: a name, or a class. The
    `options` are those of `Options`. Under zero1, zero2 and zero3 the optimizer steps this rank's parts of the
    parameters, so it must treat every element by itself, as SGD and AdamW do.
    """
    kind = get_sync(sync) if isinstance(sync, str) else sync
    optimizer = make_optimizer(list(model.parameters()))
    return Parallel(model, optimizer, kind(ledger or Ledger(), Options(**options), group)), optimizer


class Parallel(nn.Module):
    """A replica. When `backward()` returns, every .grad is the average over the ranks, as with torch's DDP.

    1. Made on every rank at once, it sends rank 0's parameters and buffers to all (the sync's `attach`).
    2. A hook on each parameter tells the sync that its gradient is there. The first one asks autograd to call back at
       backward's end, and then the sync's `finish` runs.
    3. Inside `no_sync`, backward only adds to this rank's gradients.

    Under zero1, zero2 and zero3 a rank has only its part of the average: .grad refuses to be read. Clip by
    `clip_grad_norm_`, which knows the whole norm, and read weights between `settle()` and the next step.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, sync: GradientSync):
        super().__init__()
        self.module, self.sync, self.optimizer = module, sync, optimizer
        self._averages, self._is_asked = True, False
        self._call = (lambda call: lambda *a, **k: call(*a, **k))(sync.attach(module))  # a function: no part of self
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for _, p in sync.parameters]
        if sync.shards:
            sync.shard(optimizer)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: sync.after_step()))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's own forward. Raises RuntimeError if the last backward ended in an exception."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # else a checkpointed layer's
            if self._is_asked:
                raise RuntimeError("an exception has ended this rank's last backward: end the program on every rank.")
            if self.sync.shards:
                self.sync.begin_forward()
        return self._call(*inputs, **keywords)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for forward and backward of every micro-batch of a step except the last."""
        before, self._averages = self._averages, False
        try:
            with self.sync.no_sync():
                yield
        finally:
            self._averages = before

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
        if self.sync.shards:
            with self.sync.ledger.naming("squares of the gradient", AGREEMENT):
                dist.all_reduce(squares, group=self.sync.group)
        norm = squares.sqrt().float()
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def settle(self) -> None:
        """Make every rank's model whole and equal, weights and buffers, until the next step. Every rank calls it."""
        self.sync.settle()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The training under the model's plain names, whole: ("weights/NAME", tensor), "buffers/..", "exp_avg/..".

        Every rank iterates to the end. A strategy on any number of ranks can load it. Values are valid until the next.
        """
        self.settle()
        for kind, named in (("weights", self.module.named_parameters()), ("buffers", self.module.named_buffers())):
            yield from ((f"{kind}/{name}", tensor.detach()) for name, tensor in named)
        yield from self.sync.whole_state(self.optimizer) if self.sync.shards else optimizer_pieces(self)

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a `state`, whole on every rank. Called before the first step."""
        self.settle()
        with torch.no_grad():
            for kind, named in (("weights", self.module.named_parameters()), ("buffers", self.module.named_buffers())):
                for name, tensor in named:
                    tensor.copy_(state[f"{kind}/{name}"])
        self.sync.load_whole(self.optimizer, state) if self.sync.shards else load_optimizer(self, state)

    def detach(self) -> nn.Module:
        """Remove all hooks and return the model, which is the caller's own again."""
        for hook in self._hooks:
            hook.remove()
        self.settle()
        self.sync.detach()
        return self.module

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not (self._averages or self.sync.every_backward):
            return
        if not self._is_asked:
            self._is_asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self._at_the_end)
        self.sync.ready(parameter)

    def _at_the_end(self) -> None:
        self._is_asked = False
        with torch.no_grad():
            self.sync.finish()
