"""Gradient syncs, each with one mistake that is made in practice. The parity cases must catch every one.

Many are those that `check` refuses (mutants.py).
"""

# ruff: noqa: F401 - the text uses what is imported

import mutants
import torch
import torch.distributed as dist
from mutants import Counting

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.sparse_rows import SparseRows

THEIRS = """
AveragesACopy CopiesBackAPart DropsWhatOnlyOthersUsed EverySecondStep GatherWithoutScatter HalfInBetween
LeavesOutSmallTensors NeverAveraged NoBroadcastOfFrozenWeights NoInitialBroadcast OnlyWeights OwnPartFirst RunningMean
StaleGradients SumNotMean ThroughSingle WeightsInsteadOfGradients WithoutLastRank WithoutLastTensor ZerosForUnused
divided_by_those_that_have_one divided_twice
"""
TEXT = """
def average(self, name, gradient):
divided_by_four:
    super().average(name, gradient)
    gradient *= self.ranks / 4

NotWaitedFor:
    total = gradient.clone()
    dist.all_reduce(total, async_op=True)
    gradient.copy_(total / self.ranks)

drifts:
    super().average(name, gradient)
    gradient *= 1 + 1e-4

clamped:
    super().average(name, gradient)
    gradient.clamp_(-0.02, 0.02)

ChunksWithoutRemainder:
    flat = gradient.flatten()
    size = len(flat) // 5 * 5
    first = flat[:size].clone()
    super().average(name, first)
    gradient.copy_(torch.cat([first, flat[size:]]).view_as(gradient))

def finish(self):
ClipBeforeTheAverage:
    torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], 0.01)
    super().finish()

OneBufferForAllDtypes:
    found = list(self.gradients())
    flat = torch.cat([gradient.flatten().float() for _, gradient in found])
    super().average("all", flat)
    for (_, gradient), part in zip(found, flat.split([g.numel() for _, g in found]), strict=True):
        gradient.copy_(part.view_as(gradient))

NoneForZeros:
    super().finish()
    for name, p in self.parameters:
        if name.startswith("sometimes") and self.rank == 0:
            p.grad = None

LosesWhatIsLeft(Bucketed):
    # What only an earlier micro-batch used, or another rank, is not sent.
    for bucket in self.buckets:
        for p in bucket.missing:
            p.grad = None
    super().finish()

def gradients(self):
TiedTwice:
    for name, gradient in super().gradients():
        yield name, gradient
        if name == "tied.weight":
            yield name, gradient.mul_(self.ranks)

TheFirstStepOnly(Counting):
    return super().gradients() if self.steps == 1 else []

def agree(self, has):
TheAgreementIsKept:
    self.__dict__.setdefault("agreed", super().agree(has))
    return self.agreed

def ready(self, parameter):
OnlyTheLastPass(Bucketed):
    # Forgets what earlier micro-batches have added.
    seen = self.__dict__.setdefault("seen", {})
    seen[parameter] = parameter.grad.clone()
    super().ready(parameter)
    self._bucket_of[parameter].views[parameter].sub_(0.5 * seen[parameter] / self.ranks)

def plan(self, parameters):
AnotherOrder(Bucketed):
    # Rank 1 lays its buckets from the first parameter on.
    return super().plan(parameters[::-1] if self.rank == 1 else parameters)

def make_bucket(self, name, group):
ViewsInRowOrder(Bucketed):
    # Rank 1 lays a channels_last gradient in the bucket as if it were contiguous.
    bucket = super().make_bucket(name, group)
    if self.rank == 1:
        parts = bucket.buffer.split([p.numel() for _, p in group])
        bucket.views = {p: part.view(p.shape) for part, (_, p) in zip(parts, group, strict=True)}
    return bucket

def _average_rows(self, name, p, union):
RowsOfThisRankOnly(SparseRows):
    super()._average_rows(name, p, self._marks[p] if self.rank == 0 else union)

def begin_forward(self):
RowsOfTheLastPass(SparseRows):
    super().begin_forward()
    for mark in self._marks.values():
        mark.zero_()

class:
SyncsUnderNoSync:
    every_backward = True

    def finish(self):
        super().finish()
        for _, p in self.parameters:
            if p.grad is not None:
                p.grad *= 2
"""
MUTANTS: list[type[GradientSync]] = [getattr(mutants, name) for name in THEIRS.split()]
MUTANTS += [globals()[name] for name in mutants.written(TEXT, globals())]
