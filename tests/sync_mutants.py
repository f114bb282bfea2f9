"""Gradient syncs, each with one mistake that is made in practice. The parity cases must catch every one.

Many are those that `check` refuses (mutants.py).
"""

import mutants
import torch
import torch.distributed as dist
from mutants import Counting

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.sparse_rows import SparseRows

MUTANTS: list[type[GradientSync]] = [
    mutants.AveragesACopy,
    mutants.CopiesBackAPart,
    mutants.DropsWhatOnlyOthersUsed,
    mutants.EverySecondStep,
    mutants.GatherWithoutScatter,
    mutants.HalfInBetween,
    mutants.LeavesOutSmallTensors,
    mutants.NeverAveraged,
    mutants.NoBroadcastOfFrozenWeights,
    mutants.NoInitialBroadcast,
    mutants.OnlyWeights,
    mutants.OwnPartFirst,
    mutants.RunningMean,
    mutants.StaleGradients,
    mutants.SumNotMean,
    mutants.ThroughSingle,
    mutants.WeightsInsteadOfGradients,
    mutants.WithoutLastRank,
    mutants.WithoutLastTensor,
    mutants.ZerosForUnused,
    mutants.divided_by_those_that_have_one,
    mutants.divided_twice,
]


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


@mutant_of_average
def divided_by_four(sync, name, gradient):
    gradient *= sync.ranks / 4


@mutant
class NotWaitedFor(AllReduce):
    def average(self, name, gradient):
        total = gradient.clone()
        dist.all_reduce(total, async_op=True)
        gradient.copy_(total / self.ranks)


@mutant
class ClipBeforeTheAverage(AllReduce):
    def finish(self):
        torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], 0.01)
        super().finish()


@mutant_of_average
def drifts(sync, name, gradient):
    gradient *= 1 + 1e-4


@mutant_of_average
def clamped(sync, name, gradient):
    gradient.clamp_(-0.02, 0.02)


# Some tensors


@mutant
class ChunksWithoutRemainder(AllReduce):
    def average(self, name, gradient):
        flat = gradient.flatten()
        size = len(flat) // 5 * 5
        first = flat[:size].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, flat[size:]]).view_as(gradient))


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
class NoneForZeros(AllReduce):
    def finish(self):
        super().finish()
        for name, p in self.parameters:
            if name.startswith("sometimes") and self.rank == 0:
                p.grad = None


# Some steps


@mutant
class TheFirstStepOnly(Counting):
    def gradients(self):
        return super().gradients() if self.steps == 1 else []


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
