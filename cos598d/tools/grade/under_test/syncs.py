"""Gradient syncs for students' tests: right ones first, then wrong ones.

The right ones keep the contract in unusual ways, so tests that expect more than it requires reject them. Each wrong one
has one mistake that people make in practice.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.gather_scatter import GatherScatter


class FromTheLast(AllReduce):
    """Averages tensor by tensor, from the last to the first."""

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        return super().gradients()[::-1]


class DividesFirst(AllReduce):
    """Divides each rank's gradient by n, then sums: the last bits differ."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        gradient /= self.comm.world_size
        self.comm.all_reduce(gradient, name)


class NewGradients(AllReduce):
    """Puts each average into a new tensor, which replaces the gradient."""

    def finish(self) -> None:
        parameters = dict(self.parameters)
        for name, gradient in self.gradients():
            average = gradient.clone()
            self.average(name, average)
            parameters[name].grad = average


class ReduceScatterAllGather(GradientSync):
    """The two halves of an all-reduce, one after the other.

    1. Each gradient is cut into n parts of one length, with zeros after the last elements.
    2. Rank r receives the sum of all ranks' r-th parts, and divides it by n.
    3. All ranks gather the n averages.
    """

    def average(self, name: str, gradient: torch.Tensor) -> None:
        ranks, elements = self.comm.world_size, gradient.numel()
        parts = gradient.new_zeros(ranks, -(-elements // ranks))
        parts.view(-1)[:elements] = gradient.flatten()
        for root in range(ranks):
            self.comm.reduce(parts[root], name, root=root)
        averages, call = self.comm.all_gather(parts[self.comm.rank] / ranks, name)
        call.wait()
        gradient.copy_(torch.cat(averages)[:elements].view_as(gradient))


class NeverAveraged(AllReduce):
    """Averages a copy."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        super().average(name, gradient.clone())


class SumNotMean(AllReduce):
    """Does not divide."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        self.comm.all_reduce(gradient, name)


class DividedByTwo(AllReduce):
    """Divides by 2 on any number of ranks: it was only tried on two."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        self.comm.all_reduce(gradient, name)
        gradient /= 2


class GatherWithoutScatter(GatherScatter):
    """The average stays on rank 0."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        copies = self.comm.gather(gradient, name)
        if copies is not None:
            gradient.copy_(torch.stack(copies).mean(dim=0))


class WithoutLastRank(AllReduce):
    """Its loop over the ranks ends one too early: the last rank's gradients do not count."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        last = self.comm.world_size - 1
        if self.comm.rank == last:
            gradient.zero_()
        self.comm.all_reduce(gradient, name)
        gradient /= max(last, 1)


class CopiesBackAPart(AllReduce):
    """Its buffer is too small for the longest gradients."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        buffer = gradient.flatten()[:1000].clone()
        super().average(name, buffer)
        gradient.view(-1)[:1000] = buffer


class ChunksWithoutRemainder(AllReduce):
    """Cuts each gradient into as many parts of one size as there are ranks."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        size = gradient.numel() // self.comm.world_size
        for part in range(self.comm.world_size):
            super().average(name, gradient.view(-1)[part * size : (part + 1) * size])


class WithoutLastTensor(AllReduce):
    """Its last bucket is never full, so it is never sent."""

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        return super().gradients()[:-1]


class OnlyWeights(AllReduce):
    """Averages only matrices: it forgets the biases."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        if not name.endswith("bias"):
            super().average(name, gradient)


class NoInitialBroadcast(AllReduce):
    """Each rank begins with its own weights."""

    def attach(self, model: nn.Module) -> nn.Module:
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return model


class WeightsInsteadOfGradients(AllReduce):
    """Averages the parameter instead of its gradient."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        weight = dict(self.parameters)[name].data
        super().average(name, weight)


class WeightsScaled(AllReduce):
    """Averages gradients, but also divides the weights, as a hook does that confuses the two."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        super().average(name, gradient)
        dict(self.parameters)[name].data /= self.comm.world_size


class StaleGradients(AllReduce):
    """Starts a step's calls and does not wait for them, so each step has the previous one's averages."""

    def attach(self, model: nn.Module) -> nn.Module:
        self._before: dict[str, torch.Tensor] = {}
        return super().attach(model)

    def average(self, name: str, gradient: torch.Tensor) -> None:
        super().average(name, gradient)
        latest = gradient.clone()
        gradient.copy_(self._before.get(name, latest))
        self._before[name] = latest


class OnlyLastPass(AllReduce):
    """If a step has several backward passes, it averages only what the last one added."""

    def attach(self, model: nn.Module) -> nn.Module:
        self._own: dict[str, torch.Tensor] = {}
        return super().attach(model)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self._own = {name: p.grad.clone() for name, p in self.parameters if p.grad is not None}

    def finish(self) -> None:
        super().finish()
        self._own = {}

    def average(self, name: str, gradient: torch.Tensor) -> None:
        own = self._own.get(name, torch.zeros_like(gradient))
        gradient -= own
        super().average(name, gradient)
        gradient += own


class HalfInBetween(AllReduce):
    """Sends another dtype than it was given, and so rounds to it."""

    kind = torch.float16

    def average(self, name: str, gradient: torch.Tensor) -> None:
        half = gradient.to(self.kind)
        super().average(name, half)
        gradient.copy_(half)


class ClipBeforeSync(AllReduce):
    """Clips each rank's gradients before the average, which is then another one."""

    def finish(self) -> None:
        torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], 0.3)
        super().finish()


class ZerosForUnused(AllReduce):
    """Fills in zeros if no rank has a gradient, so the optimizer moves weights that nobody used."""

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        found = []
        for name, p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            found.append((name, p.grad))
        return found
