"""Gradient syncs for students' tests: right ones first, then wrong ones.

The right ones keep the contract in unusual ways, so tests that expect more than it requires reject them. Each wrong one
has one mistake that people make in practice.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync


class FromTheLast(AllReduce):
    """Averages tensor by tensor, from the last to the first."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return reversed(list(super().gradients()))


class DividesFirst(AllReduce):
    """Divides each rank's gradient by n, then sums: the last bits differ."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        gradient /= self.ranks
        dist.all_reduce(gradient)


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
        ranks, elements = self.ranks, gradient.numel()
        parts = gradient.new_zeros(ranks, -(-elements // ranks))
        parts.view(-1)[:elements] = gradient.flatten()
        for root in range(ranks):
            dist.reduce(parts[root], root)
        averages = [torch.empty_like(parts[0]) for _ in range(ranks)]
        dist.all_gather(averages, parts[self.rank] / ranks)
        gradient.copy_(torch.cat(averages)[:elements].view_as(gradient))


class NeverAveraged(AllReduce):
    """Averages a copy."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        super().average(name, gradient.clone())


class SumNotMean(AllReduce):
    """Does not divide."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)


class DividedByTwo(AllReduce):
    """Divides by 2 on any number of ranks: it was only tried on two."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= 2


class GatherWithoutScatter(AllReduce):
    """The average stays on rank 0."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        copies = [torch.empty_like(gradient) for _ in range(self.ranks)] if self.rank == 0 else None
        dist.gather(gradient, copies)
        if copies is not None:
            gradient.copy_(torch.stack(copies).mean(dim=0))


class WithoutLastRank(AllReduce):
    """Its loop over the ranks ends one too early: the last rank's gradients do not count."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        last = self.ranks - 1
        if self.rank == last:
            gradient.zero_()
        dist.all_reduce(gradient)
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
        size = gradient.numel() // self.ranks
        for part in range(self.ranks):
            super().average(name, gradient.view(-1)[part * size : (part + 1) * size])


class WithoutLastTensor(AllReduce):
    """Its last bucket is never full, so it is never sent."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(list(super().gradients())[:-1])


class OnlyWeights(AllReduce):
    """Averages only matrices: it forgets the biases."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        if not name.endswith("bias"):
            super().average(name, gradient)


class NoInitialBroadcast(AllReduce):
    """Each rank begins with its own weights."""

    def attach(self, model: nn.Module) -> Callable:
        own = [tensor.clone() for tensor in model.state_dict().values()]
        call = super().attach(model)
        for tensor, values in zip(model.state_dict().values(), own, strict=True):
            tensor.copy_(values)
        return call


class WeightsInsteadOfGradients(AllReduce):
    """Averages the parameter instead of its gradient."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        weight = dict(self.parameters)[name].data
        super().average(name, weight)


class WeightsScaled(AllReduce):
    """Averages gradients, but also divides the weights, as a hook does that confuses the two."""

    def average(self, name: str, gradient: torch.Tensor) -> None:
        super().average(name, gradient)
        dict(self.parameters)[name].data /= self.ranks


class StaleGradients(AllReduce):
    """Starts a step's calls and does not wait for them, so each step has the previous one's averages."""

    def attach(self, model: nn.Module) -> Callable:
        self._before: dict[str, torch.Tensor] = {}
        return super().attach(model)

    def average(self, name: str, gradient: torch.Tensor) -> None:
        super().average(name, gradient)
        latest = gradient.clone()
        gradient.copy_(self._before.get(name, latest))
        self._before[name] = latest


class OnlyLastPass(AllReduce):
    """If a step has several backward passes, it averages only what the last one added."""

    def attach(self, model: nn.Module) -> Callable:
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

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            yield name, p.grad


@dataclass(frozen=True)
class Subject:
    """A sync under test. `words` describe what it does, after "a sync that". A wrong one is wrong on `least_ranks` and
    more. `sync` is its class, or the name of a built-in one."""

    words: str
    sync: type[GradientSync] | str
    least_ranks: int = 2


# They share only the contract: a test must not require of one what only another does.
RIGHT = {
    "all_reduce": Subject("sums each gradient by an all-reduce, and divides", "all_reduce"),
    "gather_scatter": Subject("averages each gradient on rank 0", "gather_scatter"),
    "bucketed": Subject("averages buckets while backward runs", "bucketed"),
    "ring": Subject("passes messages round a ring", "ring"),
    "ddp": Subject("is torch's DistributedDataParallel", "ddp"),
    "from_the_last": Subject("averages from the last tensor to the first", FromTheLast),
    "divides_first": Subject("divides before it sums, which rounds differently", DividesFirst),
    "new_gradients": Subject("puts the averages into new tensors", NewGradients),
    "in_two_halves": Subject("lets each rank sum a part of a gradient, and gathers the parts", ReduceScatterAllGather),
}
# In the order in which a student would think of them.
WRONG = {
    "never_averages": Subject("leaves every rank its own gradients", NeverAveraged),
    "sums": Subject("sums over the ranks and does not divide", SumNotMean),
    "divides_by_2": Subject("divides the sum by 2, whatever the number of ranks", DividedByTwo, least_ranks=3),
    "stays_on_rank_0": Subject("averages on rank 0, and sends nothing back", GatherWithoutScatter),
    "leaves_out_the_last_rank": Subject("averages over all ranks except the last", WithoutLastRank),
    "only_1000_elements": Subject("averages only the first 1,000 elements of a tensor", CopiesBackAPart),
    "leaves_the_remainder": Subject("averages n parts of one size, but not the remainder", ChunksWithoutRemainder),
    "forgets_the_last_tensor": Subject("averages all tensors except the last", WithoutLastTensor),
    "forgets_biases": Subject("averages no tensor that is called bias", OnlyWeights),
    "own_first_weights": Subject("leaves every rank the weights that it began with", NoInitialBroadcast),
    "averages_weights": Subject("averages the weights and leaves the gradients", WeightsInsteadOfGradients),
    "changes_weights": Subject("averages the gradients, and divides the weights too", WeightsScaled),
    "stale": Subject("gives the averages of the step before", StaleGradients),
    "only_the_last_pass": Subject("averages only what the last backward of a step added", OnlyLastPass),
    "half_precision": Subject("sends gradients as float16", HalfInBetween),
    "clips_first": Subject("clips each rank's gradients before it averages them", ClipBeforeSync),
    "zeros_for_unused": Subject("makes zeros of gradients that no rank has", ZerosForUnused),
}
