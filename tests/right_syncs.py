"""Gradient syncs that do it in unusual ways and are right: no claim may accuse them."""

import contextlib

import numpy as np
import torch

from cos598d.sync.alike import check_models
from cos598d.sync.base import GradientSync


class FlatViews(GradientSync):
    """Keeps a flat buffer for each dtype, and hands out views of it."""

    def attach(self, model):
        module, named = super().attach(model), {}
        for _, p in self.parameters:
            named.setdefault(p.dtype, []).append(p)
        self.flats = [(group, torch.zeros(sum(p.numel() for p in group), dtype=kind)) for kind, group in named.items()]
        return module

    def finish(self):
        used = self.agree_on_used([p.grad is not None for _, p in self.parameters])
        for group, flat in self.flats:
            views = [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in group]), group, strict=True)]
            for p, view in zip(group, views, strict=True):
                view.copy_(torch.zeros_like(view) if p.grad is None else p.grad.clone())
            self.comm.all_reduce(flat, f"flat {flat.dtype}")
            flat /= self.comm.world_size
            for p, view in zip(group, views, strict=True):
                p.grad = view if used[p] else None

    def detach(self):
        self.flats = []
        super().detach()


class InDouble(GradientSync):
    def average(self, name, gradient):
        wide = gradient.double()
        self.comm.all_reduce(wide, name)
        gradient.copy_(wide / self.comm.world_size)


class RandomRoot(GradientSync):
    """Every step and every tensor has a root of its own."""

    steps = 0

    def average(self, name, gradient):
        self.steps += 1
        root = int(np.random.default_rng(self.steps).integers(self.comm.world_size))
        self.comm.reduce(gradient, name, root=root)
        if self.comm.rank == root:
            gradient /= self.comm.world_size
        self.comm.broadcast(gradient, name, root=root)

    def own_state(self):
        return {"steps": self.steps}, {}

    def load_own_state(self, facts, tensors):
        self.steps = facts["steps"]


class GathersInNumpy(GradientSync):
    """Which has no bfloat16: refused on every rank."""

    def average(self, name, gradient):
        parts, call = self.comm.all_gather(gradient, name)
        call.wait()
        own = [part.numpy() for part in parts]
        gradient.copy_(torch.from_numpy(np.asarray(np.mean(own, axis=0), dtype=own[0].dtype)))


class RunningMean(GradientSync):
    """Over the ranks, from the last to the first."""

    def average(self, name, gradient):
        parts, call = self.comm.all_gather(gradient.contiguous(), name)
        call.wait()
        mean = parts[-1].clone()
        for number, part in enumerate(parts[-2::-1], 2):
            mean += (part - mean) / number
        gradient.copy_(mean)


class OwnEverything:
    """Inherits nothing, and has no other methods than the contract's four."""

    def __init__(self, world, find_unused_parameters=True):
        self.world, self.may_be_unused, self.trained = world, find_unused_parameters, []

    def attach(self, model):
        check_models(self.world, model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.world.broadcast(tensor.data, name, purpose="state")
        self.trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return model

    def finish(self):
        used = torch.tensor([p.grad is not None for _, p in self.trained], dtype=torch.int32)
        if self.may_be_unused:
            self.world.all_reduce(used, "used", purpose="agreement")
        for (name, p), count in zip(self.trained, used.tolist(), strict=True):
            if count:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / self.world.world_size
                self.world.all_reduce(p.grad, name)

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def detach(self):
        self.trained = []


class FromHooks(GradientSync):
    """Starts its calls during backward, in the order of the parameters' names."""

    def attach(self, model):
        module = super().attach(model)
        self.off, self.ready, self.calls = False, set(), {}
        self.order = sorted(self.parameters, key=lambda pair: pair[0])
        self.hooks = [p.register_post_accumulate_grad_hook(self._mark) for _, p in self.parameters]
        self.hooks += [p.register_hook(self._before(p)) for _, p in self.parameters]
        return module

    def _before(self, parameter):
        def before(_):
            if parameter in self.ready:  # a second pass of the step: what is under way first
                self.finish()

        return before

    def _mark(self, parameter):
        if not self.off:
            self.ready.add(parameter)
            self._start()

    def _start(self):
        for name, p in self.order:
            if p not in self.ready:
                break
            if name not in self.calls:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                self.calls[name] = self.comm.all_reduce(p.grad, name, async_op=True)

    def finish(self):
        has = [p.grad is not None for _, p in self.parameters]
        self.ready.update(p for _, p in self.parameters)
        self._start()
        used = self.agree_on_used(has)
        for name, p in self.order:
            self.calls[name].wait()
            p.grad = p.grad / self.comm.world_size if used[p] else None
        self.ready, self.calls = set(), {}

    @contextlib.contextmanager
    def no_sync(self):
        self.off = True
        try:
            yield
        finally:
            self.off = False

    def detach(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.order = [], []
        super().detach()
