"""Gradient syncs, each with one mistake that is made in practice. The parity cases must catch every one."""

import torch
import torch.distributed as dist

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.sparse_rows import SparseRows

MUTANTS: list[type[GradientSync]] = []


def mutant(kind: type) -> type:
    """Enters the class that it decorates."""
    MUTANTS.append(kind)
    return kind


def mutant_of_average(change) -> type:
    """Enters a sync whose average is that of all_reduce, followed by a change."""

    class Changed(AllReduce):
        def average(self, name, gradient):
            super().average(name, gradient)
            change(self, name, gradient)

    Changed.__name__ = Changed.__qualname__ = change.__name__  # by which a rank finds it
    MUTANTS.append(Changed)
    return Changed


# The average


@mutant
class SumNotMean(AllReduce):
    def average(self, name, gradient):
        dist.all_reduce(gradient)


@mutant_of_average
def divided_twice(sync, name, gradient):
    gradient /= sync.ranks


@mutant_of_average
def divided_by_four(sync, name, gradient):
    gradient *= sync.ranks / 4


@mutant
class NeverAveraged(AllReduce):
    def finish(self):
        pass


@mutant
class GatherWithoutScatter(AllReduce):
    def average(self, name, gradient):
        copies = [torch.empty_like(gradient) for _ in range(self.ranks)] if self.rank == 0 else None
        dist.gather(gradient, copies)
        if copies:
            gradient.copy_(sum(copies) / self.ranks)


@mutant
class WithoutTheLastRank(AllReduce):
    def average(self, name, gradient):
        if self.rank == self.ranks - 1:
            gradient.zero_()
        super().average(name, gradient)


@mutant
class InHalfPrecision(AllReduce):
    def average(self, name, gradient):
        half = gradient.half()
        super().average(name, half)
        gradient.copy_(half)


@mutant
class ThroughSingle(AllReduce):
    def average(self, name, gradient):
        single = gradient.float()
        super().average(name, single)
        gradient.copy_(single)


@mutant
class NotWaitedFor(AllReduce):
    def average(self, name, gradient):
        total = gradient.clone()
        dist.all_reduce(total, async_op=True)
        gradient.copy_(total / self.ranks)


@mutant
class EachRankItsOwnOrder(AllReduce):
    """Adds up in an order of its own, so that the last bits differ."""

    def average(self, name, gradient):
        parts = [torch.empty_like(gradient) for _ in range(self.ranks)]
        dist.all_gather(parts, gradient.clone())
        gradient.copy_(sum(parts[(self.rank + k) % self.ranks] for k in range(self.ranks)) / self.ranks)


@mutant
class ClipBeforeTheAverage(AllReduce):
    def finish(self):
        torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], 0.01)
        super().finish()


@mutant
class WeightsInsteadOfGradients(AllReduce):
    def finish(self):
        with torch.no_grad():
            for name, p in self.parameters:
                self.average(name, p)


@mutant_of_average
def drifts(sync, name, gradient):
    gradient *= 1 + 1e-4


@mutant_of_average
def clamped(sync, name, gradient):
    gradient.clamp_(-0.02, 0.02)


# Some tensors


@mutant
class WithoutTheLastTensor(AllReduce):
    def gradients(self):
        return list(super().gradients())[:-1]


@mutant
class OnlyWeights(AllReduce):
    def average(self, name, gradient):
        if gradient.dim() > 1:
            super().average(name, gradient)


@mutant
class SmallTensorsLeftOut(AllReduce):
    def average(self, name, gradient):
        if gradient.numel() > 1:
            super().average(name, gradient)


@mutant
class ChunksWithoutRemainder(AllReduce):
    def average(self, name, gradient):
        flat = gradient.flatten()
        size = len(flat) // 5 * 5
        first = flat[:size].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, flat[size:]]).view_as(gradient))


@mutant
class TheFirstThousand(AllReduce):
    def average(self, name, gradient):
        flat = gradient.flatten()
        first = flat[:1000].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, flat[1000:]]).view_as(gradient))


@mutant
class ACopyIsAveraged(AllReduce):
    """Where a gradient is not contiguous `flatten` makes one."""

    def average(self, name, gradient):
        super().average(name, gradient.flatten() if gradient.dim() else gradient)


@mutant
class TiedTwice(AllReduce):
    def gradients(self):
        for name, gradient in super().gradients():
            yield name, gradient
            if name == "tied.weight":
                yield name, gradient.mul_(self.ranks)


@mutant
class OneBufferForAllDtypes(AllReduce):
    def finish(self):
        found = list(self.gradients())
        flat = torch.cat([gradient.flatten().float() for _, gradient in found])
        super().average("all", flat)
        for (_, gradient), part in zip(found, flat.split([g.numel() for _, g in found]), strict=True):
            gradient.copy_(part.view_as(gradient))


@mutant
class ZerosForUnused(AllReduce):
    """Momentum moves what no rank has used."""

    def finish(self):
        super().finish()
        for _, p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad


@mutant
class NoneForZeros(AllReduce):
    def finish(self):
        super().finish()
        for name, p in self.parameters:
            if name.startswith("sometimes") and self.rank == 0:
                p.grad = None


@mutant
class OnlyWhatThisRankUsed(AllReduce):
    """Of a parameter that only others used, it takes part in the average, and drops the result."""

    def finish(self):
        has = [p.grad is not None for _, p in self.parameters]
        super().finish()
        for (_, p), own in zip(self.parameters, has, strict=True):
            p.grad = p.grad if own else None


@mutant
class DividedByThoseThatHaveOne(AllReduce):
    def average(self, name, gradient):
        have = torch.tensor(float(gradient.any()))
        dist.all_reduce(have)
        super().average(name, gradient)
        gradient *= self.ranks / max(have.item(), 1.0)


# Some steps


class Counting(AllReduce):
    steps = 0

    def finish(self):
        self.steps += 1
        super().finish()


@mutant
class TheFirstStepOnly(Counting):
    def gradients(self):
        return super().gradients() if self.steps == 1 else []


@mutant
class EverySecondStep(Counting):
    def gradients(self):
        return super().gradients() if self.steps % 2 else []


@mutant
class RunningMean(AllReduce):
    def average(self, name, gradient):
        super().average(name, gradient)
        means = self.__dict__.setdefault("means", {})
        means[name] = gradient.clone() if name not in means else 0.9 * means[name] + 0.1 * gradient
        gradient.copy_(means[name])


@mutant
class StaleGradients(AllReduce):
    def average(self, name, gradient):
        super().average(name, gradient)
        stale = self.__dict__.setdefault("stale", {})
        now = gradient.clone()
        gradient.copy_(stale.get(name, now))
        stale[name] = now


@mutant
class TheAgreementIsKept(AllReduce):
    def agree(self, has):
        self.__dict__.setdefault("agreed", super().agree(has))
        return self.agreed


# Micro-batches


@mutant
class OnlyTheLastPass(Bucketed):
    """Forgets what earlier micro-batches have added."""

    def ready(self, parameter):
        seen = self.__dict__.setdefault("seen", {})
        seen[parameter] = parameter.grad.clone()
        super().ready(parameter)
        self._bucket_of[parameter].views[parameter].sub_(0.5 * seen[parameter] / self.ranks)


@mutant
class SyncsUnderNoSync(AllReduce):
    every_backward = True

    def finish(self):
        super().finish()
        for _, p in self.parameters:
            if p.grad is not None:
                p.grad *= 2


@mutant
class LosesWhatIsLeft(Bucketed):
    """What only an earlier micro-batch used, or another rank, is not sent."""

    def finish(self):
        for missing in self._missing.values():
            for p in missing:
                p.grad = None
        super().finish()


# The start, and the buckets


@mutant
class NoInitialBroadcast(AllReduce):
    def attach(self, model):
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        call = super().attach(model)
        model.load_state_dict(own)
        return call


@mutant
class NoBroadcastOfFrozenWeights(AllReduce):
    def attach(self, model):
        own = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
        call = super().attach(model)
        for p, values in own:
            p.copy_(values)
        return call


@mutant
class AnotherOrder(Bucketed):
    """Rank 1 lays its buckets from the first parameter on."""

    def plan(self, parameters):
        return super().plan(parameters[::-1] if self.rank == 1 else parameters)


@mutant
class ViewsInRowOrder(Bucketed):
    """Rank 1 lays a channels_last gradient in the bucket as if it were contiguous."""

    def make_bucket(self, name, group):
        bucket = super().make_bucket(name, group)
        if self.rank == 1:
            parts = bucket.buffer.split([p.numel() for _, p in group])
            bucket.views = {p: part.view(p.shape) for part, (_, p) in zip(parts, group, strict=True)}
        return bucket


@mutant
class RowsOfThisRankOnly(SparseRows):
    def _average_rows(self, name, p, union):
        super()._average_rows(name, p, self._marks[p] if self.rank == 0 else union)


@mutant
class RowsOfTheLastPass(SparseRows):
    def begin_forward(self):
        super().begin_forward()
        for mark in self._marks.values():
            mark.zero_()
