"""The examined steps of one rank: sketches of every micro-batch's local gradients, and of what was applied."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from cos598d.tools.audit.sketch import Sketcher, to_text
from cos598d.tools.audit.watch.data import batch_size, sample_digests
from cos598d.tools.audit.watch.loss import Scale, scale_of
from cos598d.tools.audit.watch.places import NOWHERE, here
from cos598d.tools.audit.watch.replica import gradient_of, is_in_shards, is_plain, rates_of, settings_of

Guard = Callable[[Callable[..., None]], Callable[..., None]]


class RankSteps:
    """One rank's iterations: each is from a backward pass to the last optimizer step before the next one.

    The first `examined` iterations are examined in full, and noted in `rows`. `guard` makes a function one of the
    audit's own.
    """

    def __init__(self, sketch: Sketcher, examined: int, guard: Guard):
        self._sketch, self.examined, self._guard = sketch, examined, guard
        self.settings: dict[int, dict[str, Any]] = {}  # of optimizers at their first step, by id, in order
        self._scale = 1.0  # of a gradient scaler, in the loss of the coming backward pass
        self.iteration = self.finished = self.backwards = 0
        self.rows: list[dict[str, Any]] = []
        self.backward_place = NOWHERE
        self._names: dict[int, str] = {}
        self._hooked: dict[int, tuple[Any, Any]] = {}
        self._has_stepped, self._depth = False, 0
        self._row: dict[str, Any] = {}
        self.rates: list[float] = []  # the learning rates of the iteration's steps
        self._events = 0

    @property
    def is_examined(self) -> bool:
        """Whether the current iteration is examined in full."""
        return 0 < self.iteration <= self.examined

    @property
    def is_over(self) -> bool:
        """Whether the next backward pass begins another iteration."""
        return self._has_stepped or self.iteration == 0

    @property
    def micro(self) -> int:
        """The micro-batch of the iteration, from 0."""
        return max(len(self._row.get("micro", ())) - 1, 0)

    def hook(self, tensor: torch.Tensor) -> None:
        """Watch the gradients that are computed for this leaf, while steps are examined."""
        known = self._hooked.get(id(tensor))
        if (known and known[0]() is tensor) or self.iteration > self.examined or not self.examined:
            return
        if tensor.requires_grad and tensor.is_leaf:
            reference = weakref.ref(tensor)
            self._hooked[id(tensor)] = (reference, None)  # `register_hook` itself tells of leaves
            local = self._guard(self._local)
            handle = tensor.register_hook(lambda gradient: local(reference(), gradient))
            self._hooked[id(tensor)] = (reference, handle)

    def name(self, tensor: torch.Tensor) -> str:
        """A parameter's name in its model; without one, a number in the order of first use."""
        return self._names.setdefault(id(tensor), f"parameter {len(self._names)}")

    def call(self, names: dict[int, str]) -> None:
        """Give parameters these names, by id."""
        self._names |= names

    def backward_begins(
        self, losses: Any, gradients: Any, begins: bool, batch: list[torch.Tensor], seen: dict[str, Any]
    ) -> None:
        """A backward pass begins on `losses`, with their `gradients` if it was given any.

        begins: whether a new iteration begins. `batch` are the inputs of the forward pass before it, and `seen` other
        facts about that.
        """
        if begins:
            self._begin()
        self.backwards += 1
        self.backward_place = here(self.backward_place)
        loss, gradient = (
            next(iter(each), None) if isinstance(each, list | tuple) else each for each in (losses, gradients)
        )
        scaler, self._scale = self._scale, 1.0
        if self.is_examined:
            # Of a gradient that is computed within a step what is applied is not what is seen before it.
            self._row["has_closure"] |= self._depth > 0
            # Of several losses at once the weights are not known.
            is_one = not isinstance(losses, list | tuple) or len(losses) == 1
            scale = scale_of(loss, gradient) if is_one else Scale(None)
            self._row["micro"].append(
                seen
                | scale._asdict()
                | {
                    "size": batch_size(batch),
                    "samples": sample_digests(batch),
                    "scaler": scaler,
                    "where": self.backward_place,
                    "event": self._event(),
                }
            )

    def event(self, kind: str, **facts: Any) -> None:
        """An event of the iteration whose place in the order of calls matters."""
        if self.is_examined and len(self._row["events"]) < 10_000:
            self._row["events"].append({"kind": kind, "event": self._event(), "micro": self.micro, **facts})

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are about to be applied: sketch them."""
        self._depth += 1
        if self._depth == 1 and self.iteration:  # a step before any backward is a trial, as of a library's own copies
            if id(optimizer) not in self.settings:
                self.settings[id(optimizer)] = settings_of(optimizer)
            self.rates += rates_of(optimizer)
        if not self.is_examined or self._depth > 1:
            return
        self.event("step", where=here())
        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        leaves = [leaf for reference, _ in self._hooked.values() if (leaf := reference()) is not None]
        self._row["in_shards"] |= not all(map(is_plain, stepped)) or any(map(is_in_shards, (*stepped, *leaves)))
        for tensor in filter(is_plain, stepped):
            gradient = gradient_of(tensor)
            if gradient is not None:
                name = self.name(tensor)
                self._row["applied"][name] = to_text(self._sketch(gradient))
                self._row["elements"][name] = gradient.numel()

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        self._depth = max(self._depth - 1, 0)
        if self.iteration and not self._depth:
            self._has_stepped = True
            self.finished = self.iteration

    def scaled(self, factor: float) -> None:
        """A gradient scaler has multiplied the loss of the coming backward pass by this factor."""
        self._scale = factor

    def step_skipped(self) -> None:
        """A gradient scaler has skipped the step: the iteration is over, and cannot be judged."""
        if self._row:
            self._row["is_skipped"] = True
        self._has_stepped, self.finished = True, self.iteration

    def close(self) -> None:
        """Remove the hooks."""
        for _, handle in self._hooked.values():
            if handle is not None:
                handle.remove()
        self._hooked = {
            key: (reference, handle) for key, (reference, handle) in self._hooked.items() if reference() is not None
        }

    def _begin(self) -> None:
        self.iteration += 1
        self._has_stepped, self._events = False, 0
        if self.iteration == self.examined + 1:
            self.close()
        self._row = {}
        if self.is_examined:
            self._row = {"iteration": self.iteration, "micro": [], "local": {}, "before": {}, "applied": {}}
            self._row |= {"elements": {}, "events": [], "has_closure": False, "is_skipped": False, "in_shards": False}
            self.rows.append(self._row)

    def _local(self, tensor: torch.Tensor | None, gradient: torch.Tensor) -> None:
        """A leaf's gradient of this micro-batch, before anything has changed it."""
        if tensor is None or not self.is_examined or not self._row.get("micro"):
            return
        if not is_plain(gradient):  # a sum of what is cut could need a call
            return
        name, kept = self.name(tensor), gradient_of(tensor)
        found = self._row["local"].setdefault(name, [])
        if not found and kept is not None:
            before = self._sketch(kept)
            if before.any():
                self._row["before"][name] = to_text(before)
        found += [None] * (self.micro + 1 - len(found))
        sketch = self._sketch(gradient)
        # One leaf can get its gradient in parts.
        found[self.micro] = sketch if found[self.micro] is None else found[self.micro] + sketch

    def _event(self) -> int:
        self._events += 1
        return self._events
