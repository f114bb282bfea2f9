"""Gradient syncs, each with one mistake that is made in practice: tests of the conformance suite.

Those that a student's tests are tried on too are in `cos598d/tools/grade/under_test/syncs.py`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cos598d.data import sampler
from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import Bucketed
from cos598d.tools.grade.under_test import syncs

MEAN, OFF = "averages_gradients", "off the mean"


@dataclass(frozen=True)
class Mutant:
    """`make` gives the sync's class, after whatever else the mistake needs; `claim` must fail, and say `says`.

    The diagnosis must say `cause`.
    """

    make: Callable[[], type[GradientSync]]
    claim: str
    says: str
    cause: str
    world_sizes: tuple[int, ...] = (2,)


MUTANTS: dict[str, Mutant] = {}


def mutant(name, claim, says, cause, world_sizes=(2,), into=MUTANTS):
    """Enters the class that it decorates."""

    def enter(kind: type) -> type:
        into[name] = Mutant(lambda: kind, claim, says, cause, world_sizes)
        return kind

    return enter


@mutant("no broadcast of frozen weights", "starts_from_rank_0", "frozen.weight", "frozen.weight differs from rank 0's")
class NoBroadcastOfFrozenWeights(AllReduce):
    """Sends what it trains, and the buffers."""

    def attach(self, model):
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, tensor in (*self.parameters, *model.named_buffers()):
            self.comm.broadcast(tensor.data, name, purpose="state")
        return model


@mutant("a sum in half precision", MEAN, OFF, "summed and not averaged: off by exactly n")
class SumInHalfPrecision(AllReduce):
    """Two mistakes: the larger one is named."""

    def average(self, name, gradient):
        half = gradient.half()
        self.comm.all_reduce(half, name)
        gradient.copy_(half)


@mutant("no broadcast of buffers", "starts_from_rank_0", "buffer scale", "the buffer scale differs from rank 0's")
class NoBroadcastOfBuffers(AllReduce):
    def attach(self, model):
        own = [(buffer, buffer.clone()) for buffer in model.buffers()]
        module = super().attach(model)
        for buffer, values in own:
            buffer.copy_(values)
        return module


@mutant("calls under no_sync", "accumulates", "under no_sync", "under no_sync it comm")
class SyncsUnderNoSync(AllReduce):
    """Starts its calls from hooks without asking whether this is the last micro-batch."""

    def attach(self, model):
        module = super().attach(model)
        for name, p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda p, name=name: AllReduce.average(self, name, p.grad))
        return module

    def finish(self):
        pass


@mutant("divides what others need", "averages_gradients_that_share_memory", OFF, "wrong on below, right on 11 others")
class DividesWhatOthersNeed(AllReduce):
    """Divides each gradient in place as soon as backward has it, and sums them afterwards."""

    def attach(self, model):
        module = super().attach(model)
        self.hooks = [p.register_post_accumulate_grad_hook(self._divide) for _, p in self.parameters]
        return module

    def _divide(self, parameter):
        parameter.grad /= self.comm.world_size

    def average(self, name, gradient):
        self.comm.all_reduce(gradient, name)


@mutant("hooks left behind", "lets_go", "after detach", "after detach it still communicates")
class LeavesHooks(AllReduce):
    def attach(self, model):
        module = super().attach(model)
        for name, p in model.hidden.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._travel(name, p.grad.clone()))
        return module

    def _travel(self, name, gradient):
        self.comm.all_reduce(gradient, name)


@mutant("divided by four", MEAN, OFF, "divided by the wrong number: by 4", (2, 3))
@mutant("divided by four, trained", "trains_like_one_process", "(SGD)", "(SGD)", (3,))
class DividedByFour(AllReduce):
    def average(self, name, gradient):
        self.comm.all_reduce(gradient, name)
        gradient /= 4


@mutant("divided twice", MEAN, OFF, "divided by n twice")
class DividedTwice(AllReduce):
    def average(self, name, gradient):
        super().average(name, gradient)
        gradient /= self.comm.world_size


@mutant("first steps only", MEAN, OFF, "right only for the first 5 steps")
class FirstStepsOnly(AllReduce):
    def attach(self, model):
        self.steps = 0
        return super().attach(model)

    def finish(self):
        self.steps += 1
        if self.steps <= 5:
            super().finish()


@mutant("every second step", MEAN, OFF, "right only in every second step")
class EverySecondStep(FirstStepsOnly):
    def finish(self):
        self.steps += 1
        if self.steps % 2:
            AllReduce.finish(self)


@mutant("second backward ignored", "accumulates_without_no_sync", OFF, "second backward of a step is not averaged")
class SecondBackwardIgnored(Bucketed):
    """As `bucketed` would be if its hooks ignored a gradient that comes again."""

    def _before_gradient(self, parameter):
        def before(_):
            for call in self._calls:
                call.wait()

        return before


@mutant(
    "another order",
    MEAN,
    "rank 0 is in comm.all_reduce of large (300007 float32) while rank 1 is in comm.all_reduce of last.bias (7",
    "every rank must make the same calls in the same order",
)
class AnotherOrder(AllReduce):
    """Rank 1 goes through the gradients from the last to the first."""

    def gradients(self):
        agreed = super().gradients()
        return agreed[::-1] if self.comm.rank == 1 else agreed


@mutant("bfloat16 in between", MEAN, OFF, "half precision (bf16) on the way")
class BrainHalfInBetween(syncs.HalfInBetween):
    kind = torch.bfloat16


@mutant(
    "calls round comm", "goes_through_comm", "all_reduce in line", "torch.distributed directly, bypassing self.comm"
)
class RoundComm(AllReduce):
    def average(self, name, gradient):
        if self.comm.world_size > 1:
            dist.all_reduce(gradient)
        gradient /= self.comm.world_size


@mutant("a silent hook left behind", "lets_go", "hooks are left after detach", "detach leaves hooks behind")
class LeavesASilentHook(AllReduce):
    def attach(self, model):
        module = super().attach(model)
        self.seen = 0
        for _, p in self.parameters:
            p.register_post_accumulate_grad_hook(self._count)
        return module

    def _count(self, parameter):
        self.seen += 1


@mutant("not waited for", "waits_for_its_calls", "not waited for when finish returns", "while calls are still running")
class NotWaitedFor(AllReduce):
    def average(self, name, gradient):
        gradient /= self.comm.world_size
        self.comm.all_reduce(gradient, name, async_op=True)


@mutant("running mean", MEAN, OFF, "mixed with earlier steps: 0.1 of this step's average")
class RunningMean(AllReduce):
    def average(self, name, gradient):
        super().average(name, gradient)
        means = vars(self).setdefault("means", {})
        means[name] = gradient.clone() if name not in means else 0.9 * means[name] + 0.1 * gradient
        gradient.copy_(means[name])


@mutant("only what rank 0 used", "handles_unused_parameters", OFF, "each tensor is averaged with another one")
class OnlyWhatRank0Used(AllReduce):
    """Every rank sends what it has a gradient of, side by side."""

    def finish(self):
        gradients = [p.grad for _, p in self.parameters if p.grad is not None and p.dtype == torch.float32]
        flat = torch.zeros(3_500)
        flat[: sum(gradient.numel() for gradient in gradients)] = torch.cat([each.flatten() for each in gradients])
        super().average("side by side", flat)
        super().average("precise", dict(self.parameters)["precise"].grad)
        for gradient in gradients:
            gradient.copy_(flat[: gradient.numel()].view_as(gradient))
            flat = flat[gradient.numel() :]


def _same_data_on_all_ranks() -> type[GradientSync]:
    sampler.share_of = lambda batch, rank, world_size: batch[: max(1, len(batch) // world_size)]
    return AllReduce


def _clip_in_the_loop_before_sync() -> type[GradientSync]:
    clip = torch.nn.utils.clip_grad_norm_

    class Early(AllReduce):
        def attach(self, model):
            torch.nn.utils.clip_grad_norm_ = lambda *_: None
            frame = inspect.currentframe()
            while "config" not in frame.f_locals:  # the loop's
                frame = frame.f_back
            self.most = frame.f_locals["config"].max_grad_norm
            return super().attach(model)

        def finish(self):
            if self.most > 0:
                clip([p for _, p in self.parameters], self.most)
            super().finish()

        def detach(self):
            super().detach()
            torch.nn.utils.clip_grad_norm_ = clip

    return Early


mutant("sum not mean", MEAN, OFF, "summed and not averaged: off by exactly n")(syncs.SumNotMean)
mutant("divided by two", MEAN, OFF, "divided by the wrong number: by 2", (3, 4))(syncs.DividedByTwo)
mutant("clip before sync", MEAN, OFF, "clipped to a norm of 0.3 before the average")(syncs.ClipBeforeSync)
MUTANTS["clip before sync, in the loop"] = Mutant(
    _clip_in_the_loop_before_sync, "trains_like_one_process", "differ", "differ from one process's"
)
mutant("gather without scatter", MEAN, OFF, "but not sent back")(syncs.GatherWithoutScatter)
mutant("never averaged", MEAN, OFF, "never averaged: every rank keeps its own")(syncs.NeverAveraged)
MUTANTS["same data on all ranks"] = Mutant(
    _same_data_on_all_ranks, "trains_like_one_process", "losses differ", "losses differ from one process's"
)
mutant("weights instead of gradients", MEAN, OFF, "never averaged")(syncs.WeightsInsteadOfGradients)
mutant("weights touched too", MEAN, "changed the weight", "finish changed weights")(syncs.WeightsScaled)
mutant("no initial broadcast", "starts_from_rank_0", "differs from rank 0's", "differs from rank 0's after attach")(
    syncs.NoInitialBroadcast
)
mutant(
    "zeros for unused parameters",
    "handles_unused_parameters",
    "should have no gradient",
    "a parameter that no rank used gets a gradient",
)(syncs.ZerosForUnused)
mutant("chunks without remainder", MEAN, OFF, "the remainder of 600011 divided by 2")(syncs.ChunksWithoutRemainder)
mutant("copies back a part", MEAN, OFF, "only the first 1000 of 600011 elements")(syncs.CopiesBackAPart)
mutant("stale gradients", MEAN, OFF, "stale: each step has the average")(syncs.StaleGradients)
mutant("without the last rank", MEAN, OFF, "rank 2's gradient is not in the average", (3,))(syncs.WithoutLastRank)
mutant("without the last tensor", MEAN, OFF, "wrong on last.bias, right on")(syncs.WithoutLastTensor)
mutant("only the last pass", "accumulates", OFF, "the first backward's gradient stays each rank's own")(
    syncs.OnlyLastPass
)
mutant("half precision in between", MEAN, OFF, "half precision (fp16) on the way")(syncs.HalfInBetween)
mutant("only weights", MEAN, OFF, "wrong on biases")(syncs.OnlyWeights)
