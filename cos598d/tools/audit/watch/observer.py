"""One rank's observer: it collects torch's events for this rank's book."""

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cos598d.comm.dispatcher import DispatchedCall, listening
from cos598d.tools.audit.book import ALL_GATHER, MOST_ITERATIONS
from cos598d.tools.audit.sketch import Sketcher
from cos598d.tools.audit.watch import moments
from cos598d.tools.audit.watch.calls import CallLog, RecentCalls
from cos598d.tools.audit.watch.data import Data, Samples
from cos598d.tools.audit.watch.moments import Forwards
from cos598d.tools.audit.watch.places import ScriptLine, here
from cos598d.tools.audit.watch.replica import TrainedModel, gradient_of, is_plain, random_state
from cos598d.tools.audit.watch.steps import RankSteps

_MOST_NOTED = 256
_NO_LIMIT = 1e30  # a clip by more only measures the norm


class Observer:
    """Watches this process from `__init__` to `close`. `opened` is called when a process group exists.

    The script cannot notice it: it has its own random generator, and makes no calls to other ranks. If something goes
    wrong in it, the observation ends, with the reason in `failed`, and the script continues.
    """

    def __init__(self, examined: int, opened: Callable[[], None], kept: Callable[[], None]):
        self.failed = ""
        self.own_seconds = 0.0
        self.sketch = Sketcher()
        self.samples, self.data = Samples(), Data()
        self.steps = RankSteps(self.sketch, examined, self.guard)
        self.replica = TrainedModel(self.sketch)
        self.calls = CallLog(self.replica.known)
        self.recent = RecentCalls()
        self.saved: list[dict[str, Any]] = []
        self.gathers: list[tuple[int, ScriptLine]] = []
        self._opened, self._kept = opened, kept
        self.iterations: list[dict[str, Any]] = []
        self.start: dict[str, Any] = {}
        self.is_open = False
        self._begun = 0  # epochs of loaders, at the last backward pass
        self._losses: list[Any] = []
        self._passes = 0
        self._has_begun_epoch = False  # of the training data, after the first backward pass of the iteration
        # Modules that were called with gradients since the last backward pass: with which batch, and in which mode.
        self._batches: dict[int, tuple[torch.nn.Module, list[torch.Tensor], bool]] = {}
        self._rng = ""
        self._in_backward, self._is_evaluating = 0, False
        self._forwards = Forwards(self.guard(self._forward_begins), self.guard(self._forward_ended))
        moments.listen(self)
        self._listening = contextlib.ExitStack()
        self._listening.enter_context(listening(self.guard(self._called), self.guard(self._call_begins)))

    def close(self) -> None:
        """Stop watching."""
        moments.listen(None)
        self._listening.close()
        self._forwards.close()
        with contextlib.suppress(RuntimeError):
            self.steps.close()
        if self.steps.iteration and self.steps.is_over and not self.failed:
            self._end_iteration()

    def guard(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function as one of the audit's own: its time is counted, and its errors are no errors of the script."""

        def guarded(*arguments: Any) -> None:
            if self.failed:
                return
            began = time.perf_counter()
            try:
                function(*arguments)
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
            self.own_seconds += time.perf_counter() - began

        return guarded

    def backward_begins(self, losses: Any, gradients: Any) -> None:
        """`torch.autograd.backward` is called on these tensors, with their gradients if it was given any."""
        self._in_backward += 1
        if self._in_backward == 1:
            self.guard(self._backward_begins)(losses, gradients)

    def backward_ended(self) -> None:
        self._in_backward -= 1
        if self._in_backward == 0:
            self.calls.gradients_changed()

    def saves(self, file: Any) -> None:
        if isinstance(file, str | os.PathLike) and len(self.saved) < _MOST_NOTED:
            path = os.path.realpath(os.fsdecode(file))
            self.saved.append({"path": path, "calls": self.recent.count, "where": here()})

    def open(self) -> None:
        """Note the process group, if the script has opened one."""
        if not self.is_open and dist.is_available() and dist.is_initialized():
            self.is_open = True
            self._opened()

    def _forward_begins(self, module: torch.nn.Module) -> None:
        if torch.is_grad_enabled() and self.steps.iteration <= self.steps.examined:
            self._rng = random_state(next(module.parameters()).device)
            if module.training and not all(map(is_plain, module.parameters())):
                self._trains(module)  # before FSDP gathers what it has cut

    def _forward_ended(self, module: torch.nn.Module, batch: list[torch.Tensor]) -> None:
        if torch.is_grad_enabled() and module.training:
            self._is_evaluating = False
            self._trains(module)
            self._called_with(module, batch)
        elif not torch.is_grad_enabled():
            if not self._is_evaluating:
                self.samples.evaluation_begins()
            self._is_evaluating = True
            self.samples.evaluate(batch, self.data.begun)
        elif id(module) not in self._batches:
            self._called_with(module, batch)  # trained as it is used, if a backward pass follows

    def _called_with(self, module: torch.nn.Module, batch: list[torch.Tensor]) -> None:
        self._batches[id(module)] = module, batch, module.training

    def _trains(self, module: torch.nn.Module) -> None:
        if self.replica.trained(module):
            self.steps.call(self.replica.names)
            for _, weight in self.replica.known()["weight"]:
                self.steps.hook(weight)  # of those that this rank does not step, too
            self.calls.gradients_changed()

    def _backward_begins(self, losses: Any, gradients: Any) -> None:
        self.open()
        begins = self.steps.is_over
        if begins and self.steps.iteration:
            self._end_iteration()
        called = [*self._batches.values()]
        for module, _, _ in called:
            if _is_trainable(module):
                self._trains(module)
        if not self.start:
            self.start = self.replica.sketches()
        if self._passes and self.data.begun > self._begun and not self._has_begun_epoch:
            kept = [gradient_of(weight) for _, weight in self.replica.known()["weight"]]
            # zero_grad() may have dropped what the last epoch left
            self._has_begun_epoch = any(each is not None and bool(each.to_dense().any()) for each in kept)
        self._passes, self._begun = self._passes + 1, self.data.begun
        self.data.backward()
        # What one module makes for another is no batch.
        batches = [each for _, each, _ in called if not any(tensor.grad_fn is not None for tensor in each)]
        batch = (batches or [each for _, each, _ in called] or [[]])[-1]
        seen = {"rng": self._rng, "is_training": any(is_training for _, _, is_training in called)}
        self.steps.backward_begins(losses, gradients, begins, batch, seen)
        self.samples.trained(batch, self.data.is_second_epoch())
        self._batches = {}
        loss = losses[0] if isinstance(losses, list | tuple) and losses else losses
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def clipped(self, how: str, limit: Any, norm: Any) -> None:
        """Gradients were clipped. `how` is "norm" or "value", `limit` the argument, `norm` the returned value."""
        limit = float(limit)
        if self.steps.is_examined and limit < _NO_LIMIT:
            is_number = isinstance(norm, int | float | torch.Tensor) and not hasattr(norm, "placements")
            value = float(norm) if is_number else math.nan
            self.steps.event("clip", how=how, limit=limit, norm=value if math.isfinite(value) else None, where=here())

    def _called(self, call: DispatchedCall) -> None:
        self.open()
        in_backward = self._in_backward > 0
        facts = self.calls.enter(
            call, self.steps.iteration, in_backward, not self.steps.is_over, self.steps.backward_place
        )
        self.recent.began(call, facts)
        about = {name: facts[name] for name in ("op", "names", "elements", "in_backward", "where")}
        self.steps.event("call", **about, carries=facts["kind"], root=call.root, ranks=call.ranks)

    def _call_begins(self, call: DispatchedCall) -> None:
        if call.op == ALL_GATHER and len(self.gathers) < _MOST_NOTED:
            gather = sum(each.numel() for each in call.tensors), here()
            if gather not in self.gathers:
                self.gathers.append(gather)
                self._kept()  # gloo aborts a process whose sizes do not match, before it could leave a book
        if call.adds and self._is_evaluating and not self._in_backward:
            self.samples.adds_up(call.tensors, self.data.drawn(), here(self.steps.backward_place))

    def _end_iteration(self) -> None:
        """Close the iteration that has stepped, for good."""
        self.calls.iteration_ended()
        if len(self.iterations) < MOST_ITERATIONS:
            losses = [float(each) for each in self._losses]
            self.iterations.append(
                {
                    "losses": [each for each in losses if math.isfinite(each)],
                    "rates": self.steps.rates,
                    "passes": self._passes,
                    "begins_epoch": self._has_begun_epoch,
                }
            )
        self._losses, self.steps.rates = [], []
        self._passes, self._has_begun_epoch = 0, False
        if self.steps.iteration <= self.steps.examined:
            self._kept()


def _is_trainable(module: torch.nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())
