"""What syncs share that start their calls while backward still runs: hooks, and the same order on every rank."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from cos598d.comm.calls import Pending
from cos598d.sync.base import GradientSync
from cos598d.sync.buckets import Named
from cos598d.sync.parts.own_loop import watch_gradients


class OverlappingSync(GradientSync):
    """Gradients are sent in units of one or more parameters, as soon as all gradients of a unit are ready.

    A subclass defines the units and what happens to them:

    make_units(parameters)   the units in the order in which their gradients arrive
    ready(unit, place)       the local gradient of the unit's parameter `place` is final (or does not exist)
    start(unit)              all of the unit's gradients are ready: start its call and return it
    end(unit, is_used)       the call has ended: put the averages into .grad, or None where `is_used` is False
    begin_step()             forget the last step's state; call super's

    `units` are the result of make_units. `detach` removes `hooks`, to which a subclass may add its own.

    1. A hook on each parameter, called when its gradient is complete, marks it ready.
    2. A unit starts when it is complete and all units before it have started. So every rank makes the same calls in the
       same order, whatever the order in which its gradients arrive.
    3. `finish` marks what backward left out, starts the remaining units, and waits for all calls in order.
    4. Backward may reach a parameter again that it has marked in this step (a second backward without `no_sync`). Step
       3 is done first then, before anything is added to a gradient that is being sent. So the second backward's
       gradients are added to averages, and averaged again. That is correct: averaging does not change the sum over
       ranks of .grad, so after the last average every rank holds the mean of everything that was added.
    """

    overlaps = True

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        self.units = self.make_units(self.parameters)
        self._place = {p: (unit, place) for unit, group in enumerate(self.units) for place, (_, p) in enumerate(group)}
        self.hooks = watch_gradients([p for _, p in self.parameters], self._on_gradient)
        self.hooks += [p.register_hook(self._before_gradient(p)) for _, p in self.parameters]
        self._accumulating = False
        self.begin_step()
        return module

    def make_units(self, parameters: Sequence[Named]) -> list[list[Named]]:
        """The trainable parameters, each in one unit, in the order in which units start."""
        raise NotImplementedError(f"{type(self).__name__} has no make_units()")

    def ready(self, unit: int, place: int) -> None:
        """Called once per step for each parameter, before its unit starts."""

    def start(self, unit: int) -> Pending:
        """Start the unit's call without waiting for it."""
        raise NotImplementedError(f"{type(self).__name__} has no start()")

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        """Called when the unit's call has ended. `is_used` is, per parameter of the unit, whether any rank used it."""

    def begin_step(self) -> None:
        """Reset the state of a step. Called when the model is attached, and after each average."""
        self._waiting_for: dict[nn.Parameter, None] = dict.fromkeys(self._place)  # a dict for its order
        self._missing = [len(unit) for unit in self.units]
        self._calls: list[Pending] = []

    def finish(self) -> None:
        self._average()

    def _average(self) -> None:
        """Replace every current .grad by its average. Every rank makes the same calls in the same order."""
        has = [p.grad is not None for _, p in self.parameters]
        # A parameter that the last micro-batch did not use may have a gradient of an earlier one.
        for _, p in reversed(self.parameters):
            if p in self._waiting_for:
                self._mark(p)
        # Only now: every rank has started every unit, so this call has the same place in the order too.
        is_used = self.agree_on_used(has)
        for unit, call in enumerate(self._calls):
            call.wait()
            self.end(unit, [is_used[p] for _, p in self.units[unit]])
        self.begin_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, True  # contexts may be nested, as in torch
        try:
            yield
        finally:
            self._accumulating = before

    def detach(self) -> None:
        for handle in self.hooks:
            handle.remove()
        self.hooks, self.units, self._place, self._waiting_for = [], [], {}, {}
        super().detach()

    def _before_gradient(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        """A hook that runs just before something is added to the parameter's gradient."""

        def before(_: torch.Tensor) -> None:
            if parameter not in self._waiting_for and not self.has_fault:
                self._average()

        return before

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        # After a fault, no other rank makes the remaining calls of this backward.
        if not self._accumulating and not self.has_fault and parameter in self._waiting_for:
            self._mark(parameter)

    def _mark(self, parameter: nn.Parameter) -> None:
        del self._waiting_for[parameter]
        unit, place = self._place[parameter]
        self.ready(unit, place)
        self._missing[unit] -= 1
        while len(self._calls) < len(self.units) and self._missing[len(self._calls)] == 0:
            self._calls.append(self.start(len(self._calls)))
