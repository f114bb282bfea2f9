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
from cos598d.tools.audit.book import ALL_GATHER, GRADIENT, MOST_ITERATIONS, SCALAR
from cos598d.tools.audit.sketch import Sketcher
from cos598d.tools.audit.watch import moments
from cos598d.tools.audit.watch.calls import CallLog, RecentCalls
from cos598d.tools.audit.watch.data import Data, Samples
from cos598d.tools.audit.watch.moments import Forwards
from cos598d.tools.audit.watch.places import here
from cos598d.tools.audit.watch.replica import TrainedModel, random_state
from cos598d.tools.audit.watch.shards import Shards, local
from cos598d.tools.audit.watch.steps import RankSteps

_MOST_SAVED = 256
_NO_LIMIT = 1e30  # a clip by more only measures the norm


class Observer:
    """Watches this process from `__init__` to `close`. `opened` is called when a process group exists.

    The script cannot notice it: it has its own random generator, and makes no calls to other ranks. If something goes
    wrong in it, the observation ends, with the reason in `failed`, and the script continues.
    """

    def __init__(self, examined: int, opened: Callable[[], None], kept: Callable[[], None]):
        self.failed = ""
        self.own_seconds = self.own_after = 0.0
        self.sketch = Sketcher()
        self.shards, self.samples, self.data = Shards(), Samples(), Data()
        self.steps = RankSteps(self.sketch, examined, self._guard, self.shards)
        self.replica = TrainedModel(self.sketch, self.shards)
        self.calls = CallLog(self.replica.known, self.shards)
        self.recent = RecentCalls()
        self.saved: list[dict[str, Any]] = []
        self._opened, self._kept = opened, kept
        self.began = time.perf_counter()
        self.iterations: list[dict[str, Any]] = []
        self.start: dict[str, Any] = {}
        self.counts = {"forward": 0, "backward": 0, "step": 0, "clip": 0}
        self.is_open = False
        self._begun = 0  # epochs of loaders, at the last backward pass
        self._phases = dict.fromkeys(("forward", "backward", "clip", "step"), 0.0)
        self._losses: list[Any] = []
        self._size, self._passes = 0, 0
        self._has_begun_epoch = False  # of the training data, after the first backward pass of the iteration
        # Modules that were called with gradients since the last backward pass: with which batch, and in which mode.
        self._batches: dict[int, tuple[torch.nn.Module, list[torch.Tensor], bool]] = {}
        self._rng, self._device = "", torch.device("cpu")
        self._probe: tuple[torch.Tensor, float] | None = None
        self._in_backward, self._is_evaluating = 0, False
        # When the last step began and ended, and the iteration before; what the loaders took until then.
        self._step_began, self._ended, self._since_data = 0.0, 0.0, 0.0
        self._mark: float | None = None
        self._forwards = Forwards(
            self._guard(self._forward_begins), self._guard(self._forward_ended), self._inner_ended
        )
        moments.listen(self)
        self._listening = contextlib.ExitStack()
        self._listening.enter_context(listening(self._guard(self._called), self._guard(self._adds_up)))

    def close(self) -> None:
        """Stop watching."""
        moments.listen(None)
        self._listening.close()
        self._forwards.close()
        with contextlib.suppress(RuntimeError):
            self.steps.close()
        if self.steps.iteration and self.steps.is_over and not self.failed:
            self._end_iteration()

    def _guard(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, with its time counted as the audit's. Its errors are no errors of the script."""

        def guarded(*arguments: Any) -> None:
            if self.failed:
                return
            began = time.perf_counter()
            try:
                function(*arguments)
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - began
            self.own_seconds += seconds
            if not self.steps.is_examined and self.steps.iteration:
                self.own_after += seconds

        return guarded

    def leaf(self, tensor: torch.Tensor) -> None:
        """A parameter is about to get a hook, or to be given to an optimizer."""
        self._guard(self.steps.hook)(tensor)

    def backward_begins(self, losses: Any, gradients: Any) -> None:
        """`torch.autograd.backward` is called on these tensors, with their gradients if it was given any."""
        self._in_backward += 1
        if self._in_backward == 1:
            self._guard(self._backward_begins)(losses, gradients)

    def backward_ended(self, seconds: float) -> None:
        self._in_backward -= 1
        if self._in_backward == 0:
            self._phases["backward"] += seconds
            self._guard(self.steps.backward_ended)()
            self.calls.gradients_changed()

    def clip_begins(self) -> None:
        self._guard(self._clip_begins)()

    def clipped(self, how: str, limit: Any, norm: Any, seconds: float) -> None:
        """Gradients were clipped. `how` is "norm" or "value", `limit` the argument, `norm` the returned value."""
        self._phases["clip"] += seconds
        self.counts["clip"] += 1
        self._guard(self._clipped)(how, limit, norm)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._guard(self._open)()
        self._guard(self.steps.step_begins)(optimizer)
        self._step_began = time.perf_counter()

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._phases["step"] += time.perf_counter() - self._step_began
        self.counts["step"] += 1
        self._ended = time.perf_counter()
        self._guard(self.steps.step_ended)(optimizer)

    def scaled(self, factor: float) -> None:
        """A gradient scaler has multiplied a loss by this factor."""
        self._guard(self.steps.scaled)(factor)

    def step_skipped(self) -> None:
        """A gradient scaler has skipped a step."""
        self._ended = time.perf_counter()
        self._guard(self.steps.step_skipped)()

    def waited(self, work: Any, seconds: float) -> None:
        """A call was waited for, for so many seconds."""
        self._guard(self.calls.waited)(work, seconds)

    def saves(self, file: Any) -> None:
        self._guard(self._saves)(file)

    def _saves(self, file: Any) -> None:
        if isinstance(file, str | os.PathLike) and len(self.saved) < _MOST_SAVED:
            path = os.path.realpath(os.fsdecode(file))
            self.saved.append({"path": path, "calls": self.recent.count, "where": [*here()]})

    def look_for_group(self) -> None:
        """The script ends, perhaps before its first call: note the process group that it has opened."""
        self._guard(self._open)()

    def _open(self) -> None:
        if not self.is_open and dist.is_available() and dist.is_initialized():
            self.is_open = True
            self._opened()

    def _forward_begins(self, module: torch.nn.Module) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()
        if torch.is_grad_enabled() and _is_trainable(module) and self.shards.look(module):
            self.steps.call(self.shards.names)
        if torch.is_grad_enabled() and (self.steps.is_over or self.steps.is_examined):
            parameter = next(module.parameters())
            self._device = parameter.device
            self._rng = random_state(parameter.device) if self.steps.iteration <= self.steps.examined else ""

    def _inner_ended(self, module: torch.nn.Module) -> None:
        """A module's forward pass is over, and what FSDP has gathered for it is still there."""
        if self.shards.are_there and self.steps.iteration <= self.steps.examined:
            self._guard(self._gathered)(module)

    def _gathered(self, module: torch.nn.Module) -> None:
        for leaf in self.shards.gathered(module):
            self.steps.hook(leaf)

    def _forward_ended(self, module: torch.nn.Module, batch: list[torch.Tensor], seconds: float) -> None:
        self.counts["forward"] += 1
        self._phases["forward"] += seconds
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
            self.calls.model_is_known()

    def _backward_begins(self, losses: Any, gradients: Any) -> None:
        self._open()
        begins = self.steps.is_over
        if begins and self.steps.iteration:
            self._end_iteration()
        called = [*self._batches.values()]
        for module, _, _ in called:
            if _is_trainable(module):
                self._trains(module)
        if not self.start:
            self.start = self.replica.sketches()
        self.counts["backward"] += 1
        self._has_begun_epoch |= self._passes > 0 and self.data.begun > self._begun
        self._passes, self._begun = self._passes + 1, self.data.begun
        self.data.backward()
        # What one module makes for another is no batch.
        batches = [each for _, each, _ in called if not any(tensor.grad_fn is not None for tensor in each)]
        batch = (batches or [each for _, each, _ in called] or [[]])[-1]
        seen = {
            "rng": self._rng,
            "is_training": any(is_training for _, _, is_training in called),
        }
        self.steps.backward_begins(losses, gradients, begins, batch, seen, self.replica)
        self.samples.trained(batch, self.data.is_second_epoch())
        self._size += len(batch[0]) if batch and batch[0].dim() else 0
        self._batches = {}
        loss = losses[0] if isinstance(losses, list | tuple) and losses else losses
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def _clip_begins(self) -> None:
        """Measure the largest sharded gradient: the clip's norm is not a plain number if gradients are cut."""
        self._probe = None
        if self.steps.is_examined:
            parts = [local(each.grad) for each in self.shards.holders.values() if each.grad is not None]
            largest = max(parts, key=torch.Tensor.numel, default=None)
            self._probe = None if largest is None or not largest.numel() else (largest, float(largest.norm()))

    def _clipped(self, how: str, limit: Any, norm: Any) -> None:
        limit = float(limit)
        if self.steps.is_examined and limit < _NO_LIMIT:
            is_number = isinstance(norm, int | float | torch.Tensor) and not hasattr(norm, "placements")
            value = float(norm) if is_number else None
            value = None if value is None or not math.isfinite(value) else value
            factor = float(self._probe[0].norm()) / self._probe[1] if self._probe and self._probe[1] else None
            self.steps.event("clip", how=how, limit=limit, norm=value, factor=factor, where=[*here()])

    def _called(self, call: DispatchedCall) -> None:
        self._open()
        is_between = not self.steps.is_over
        in_backward = self._in_backward > 0
        row = self.calls.enter(
            call, self.steps.iteration, in_backward, is_between, self.steps.backward_place, self.steps.arrived
        )
        self.recent.began(call, row)
        if self.calls.is_new and call.op == ALL_GATHER and not in_backward:
            self._kept()  # gloo aborts a process whose sizes do not match, before it could leave a book
        if row["kind"] == GRADIENT and in_backward and len(call.tensors) == 1 and call.tensors[0].numel() <= 1:
            row["kind"] = SCALAR  # DDP asks in a scalar which parameters were used
        facts = {name: row[name] for name in ("op", "names", "elements", "dtype", "in_backward", "where")}
        self.steps.event("call", **facts, carries=row["kind"], root=call.root, ranks=list(call.ranks))

    def _adds_up(self, tensors: list[torch.Tensor]) -> None:
        if self._is_evaluating and not self._in_backward:
            self.samples.adds_up(tensors, self.data.drawn(), [*here(self.steps.backward_place)])

    def _end_iteration(self) -> None:
        """Close the iteration that has stepped, for the record."""
        totals = self.calls.take_totals()
        ended, began = self._ended, self._mark if self._mark is not None else self._ended
        self._mark = ended
        if len(self.iterations) < MOST_ITERATIONS:
            losses = [float(each) for each in self._losses]
            data = self.data.seconds - self._since_data
            self.iterations.append(
                {
                    "losses": [each for each in losses if math.isfinite(each)],
                    "size": self._size,
                    "seconds": max(ended - began, 1e-9),
                    "phases": self._phases | {"data": data},
                    "totals": {kind: [*sums] for kind, sums in totals.items()},
                    "rates": self.steps.rates,
                    "passes": self._passes,
                    "begins_epoch": self._has_begun_epoch,
                }
            )
        self._since_data = self.data.seconds
        self._phases = dict.fromkeys(self._phases, 0.0)
        self._losses, self._size, self.steps.rates = [], 0, []
        self._passes, self._has_begun_epoch = 0, False
        if self.steps.iteration <= self.steps.examined:
            self._kept()


def _is_trainable(module: torch.nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())
