"""Gradient syncs, each with one mistake that is made in practice. The parity cases must catch every one.

Most of them are those that `check` must refuse too.
"""

import mutants as of_check
import torch
import torch.distributed as dist

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.sparse_rows import SparseRows

SHARED = """
    SumNotMean DividedByFour divided_twice NeverAveraged GatherWithoutScatter WithoutLastRank HalfInBetween
    ThroughSingle NotWaitedFor OwnPartFirst ClipBeforeSync WeightsInsteadOfGradients Drifts WithoutLastTensor
    OnlyWeights LeavesOutSmallTensors ChunksWithoutRemainder AveragesACopy ZerosForUnused
    DropsWhatOnlyOthersUsed EverySecondStep RunningMean StaleGradients OnlyLastPass SyncsUnderNoSync
    NoInitialBroadcast NoBroadcastOfFrozenWeights AnotherOrder
"""
MUTANTS: list[type[GradientSync]] = [getattr(of_check, name) for name in SHARED.split()]


def mutant(kind: type) -> type:
    """Enters the class that it decorates."""
    MUTANTS.append(kind)
    return kind


@mutant
class Clamped(AllReduce):
    def average(self, name, gradient):
        super().average(name, gradient)
        gradient.clamp_(-0.02, 0.02)


@mutant
class TheFirstThousand(AllReduce):
    def average(self, name, gradient):
        flat = gradient.flatten()
        first = flat[:1000].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, flat[1000:]]).view_as(gradient))


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


@mutant
class TheAgreementIsKept(AllReduce):
    def agree(self, has):
        self.__dict__.setdefault("agreed", super().agree(has))
        return self.agreed


@mutant
class DividedByThoseThatHaveOne(AllReduce):
    def average(self, name, gradient):
        have = torch.tensor(float(gradient.any()))
        dist.all_reduce(have)
        super().average(name, gradient)
        gradient *= self.ranks / max(have.item(), 1.0)


@mutant
class LosesWhatIsLeft(Bucketed):
    """What only an earlier micro-batch used, or another rank, is not sent."""

    def finish(self):
        for missing in self._missing.values():
            for p in missing:
                p.grad = None
        super().finish()


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
