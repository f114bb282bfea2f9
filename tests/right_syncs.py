"""Gradient syncs that do it in unusual ways and are right: no test may accuse them. Loaded as FILE.py:CLASS."""
# ruff: noqa: F401 - the text uses what is imported

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mutants import written

from cos598d.sync.base import GradientSync

TEXT = """
def average(self, name, gradient):
Plain(GradientSync):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()

FallsBack(GradientSync):
    try:
        dist.all_reduce(gradient.to(torch.int16))  # which gloo has not
    except RuntimeError:
        dist.all_reduce(gradient)
    gradient /= self.ranks

InDouble(GradientSync):
    wide = gradient.double()
    dist.all_reduce(wide)
    gradient.copy_(wide / self.ranks)

GathersInNumpy(GradientSync):
    # Which has no bfloat16: refused on every rank.
    parts = [torch.empty_like(gradient.contiguous()) for _ in range(self.ranks)]
    dist.all_gather(parts, gradient.contiguous())
    own = [part.numpy() for part in parts]
    gradient.copy_(torch.from_numpy(np.asarray(np.mean(own, axis=0), dtype=own[0].dtype)))

RunningMean(GradientSync):
    # Over the ranks, from the last to the first.
    parts = [torch.empty_like(gradient.contiguous()) for _ in range(self.ranks)]
    dist.all_gather(parts, gradient.contiguous())
    mean = parts[-1].clone()
    for number, part in enumerate(parts[-2::-1], 2):
        mean += (part - mean) / number
    gradient.copy_(mean)

Functional(GradientSync):
    total = functional.all_reduce(gradient, "sum", list(range(self.ranks)))
    gradient.copy_(functional.wait_tensor(total) / self.ranks)

def finish(self):
Futures(GradientSync):
    # As a hook of DDP's: the division follows the call's future.
    after = []
    for _, gradient in self.gradients():
        future = dist.all_reduce(gradient, async_op=True).get_future()
        after.append((gradient, future.then(lambda done: done.value()[0] / self.ranks)))
    for gradient, future in after:
        gradient.copy_(future.wait())

AgreesOnANorm(Plain):
    # Sums a number over the ranks in each step, and keeps it.
    super().finish()
    self.norm = torch.tensor(sum(float(p.grad.norm()) for _, p in self.parameters if p.grad is not None))
    dist.all_reduce(self.norm)

class:
FlatViews(GradientSync):
    # Keeps a flat buffer for each dtype, and hands out views of it.
    def attach(self, model):
        module, named = super().attach(model), {}
        for _, p in self.parameters:
            named.setdefault(p.dtype, []).append(p)
        self.flats = [(group, torch.zeros(sum(p.numel() for p in group), dtype=kind)) for kind, group in named.items()]
        return module

    def finish(self):
        used = dict(zip([p for _, p in self.parameters], self.used(), strict=True))
        for group, flat in self.flats:
            views = [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in group]), group, strict=True)]
            for p, view in zip(group, views, strict=True):
                view.copy_(torch.zeros_like(view) if p.grad is None else p.grad.clone())
            dist.all_reduce(flat)
            flat /= self.ranks
            for p, view in zip(group, views, strict=True):
                p.grad = view if used[p] else None

RandomRoot(GradientSync):
    # Every step and every tensor has a root of its own.
    steps = 0

    def average(self, name, gradient):
        self.steps += 1
        root = int(np.random.default_rng(self.steps).integers(self.ranks))
        total = gradient.contiguous()
        dist.reduce(total, root)
        dist.broadcast(total, root)
        gradient.copy_(total / self.ranks)

    def own_state(self):
        return {"steps": torch.tensor(self.steps)}

    def load_own_state(self, state):
        self.steps = int(state["steps"])

FromHooks(GradientSync):
    # Starts its calls during backward, in the order of the parameters' names.
    def attach(self, model):
        module = super().attach(model)
        self.order = sorted(self.parameters, key=lambda pair: pair[0])
        self.here, self.calls = set(), {}
        return module

    def ready(self, parameter):
        self.here.add(parameter)
        self._start()

    def _start(self):
        for name, p in self.order:
            if p not in self.here:
                break
            if name not in self.calls:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                flat = torch.view_as_real(p.grad) if p.is_complex() else p.grad
                self.calls[name] = dist.all_reduce(flat, async_op=True)

    def finish(self):
        has = [p.grad is not None for _, p in self.parameters]
        self.here.update(p for _, p in self.parameters)
        self._start()
        used = dict(zip([p for _, p in self.parameters], self.agree(has), strict=True))
        for name, p in self.order:
            self.calls[name].wait()
            p.grad = p.grad / self.ranks if used[p] else None
        self.here, self.calls = set(), {}
"""
RIGHT = tuple(written(TEXT, globals()))
