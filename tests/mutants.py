"""Gradient syncs, each with one mistake that is made in practice. `check` must refuse every one, by the test that sees
it. This file is loaded as a student's is: FILE.py:CLASS."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import Bucketed

MEAN, START, UNUSED = "averages_gradients", "starts_from_rank_0", "handles_unused_parameters"
ANY, OVERFLOW, TRAINS = "averages_any_tensors", "passes_overflow_on", "trains_like_one_process"


@dataclass(frozen=True)
class Mutant:
    """`test` must refuse it on n ranks, with `says` in the sentence. alone: it ends its world, so it gets its own."""

    test: str
    says: str
    n: int = 2
    alone: bool = False


MUTANTS: dict[str, Mutant] = {}


def mutant(test, says, n=2, alone=False):
    """Enters the class that it decorates."""

    def enter(kind: type) -> type:
        MUTANTS[kind.__name__] = Mutant(test, says, n, alone)
        return kind

    return enter


def changing(test, says, n=2, after=True):
    """Enters a sync that averages, and calls the function that it decorates after each average, or before it."""

    def enter(change) -> type:
        class Averaging(AllReduce):
            def average(self, name, gradient):
                if not after:
                    change(self, name, gradient)
                super().average(name, gradient)
                if after:
                    change(self, name, gradient)

        Averaging.__name__ = Averaging.__qualname__ = change.__name__
        return mutant(test, says, n)(Averaging)

    return enter


class Counting(AllReduce):
    """Knows the number of its step."""

    steps = 0

    def finish(self):
        self.steps += 1
        super().finish()


# The average


@mutant(MEAN, "the sum over 2 ranks, not their average: divide by n")
class SumNotMean(AllReduce):
    def average(self, name, gradient):
        dist.all_reduce(gradient)


@mutant(MEAN, "the sum over 2 ranks")
class SumInHalfPrecision(AllReduce):
    """Two mistakes: the larger one is named."""

    def average(self, name, gradient):
        half = gradient.half()
        dist.all_reduce(half)
        gradient.copy_(half)


@mutant(MEAN, "divided by the wrong number? by 2 on 3 ranks", 3)
class DividedByTwo(AllReduce):
    def average(self, name, gradient):
        dist.all_reduce(gradient)
        gradient /= 2


@mutant(MEAN, "divided by the wrong number? by 4 on 3 ranks", 3)
class DividedByFour(AllReduce):
    def average(self, name, gradient):
        dist.all_reduce(gradient)
        gradient /= 4


@changing(MEAN, "the average divided by n a second time")
def divided_twice(sync, name, gradient):
    gradient /= sync.ranks


@mutant(MEAN, "keeps its own gradient, not the average")
class NeverAveraged(AllReduce):
    def finish(self):
        pass


@mutant(MEAN, "and the average was not sent back")
class GatherWithoutScatter(AllReduce):
    def average(self, name, gradient):
        copies = [torch.empty_like(gradient) for _ in range(self.ranks)] if self.rank == 0 else None
        dist.gather(gradient, copies)
        if copies:
            gradient.copy_(sum(copies) / self.ranks)


@mutant(MEAN, "rank 2's gradient is not in the average", 3)
class WithoutLastRank(AllReduce):
    def average(self, name, gradient):
        if self.rank == self.ranks - 1:
            gradient.zero_()
        super().average(name, gradient)


@mutant(MEAN, "is rounded (a relative error of")
class HalfInBetween(AllReduce):
    kind = torch.float16

    def average(self, name, gradient):
        half = gradient.to(self.kind)
        super().average(name, half)
        gradient.copy_(half)


@mutant(MEAN, "is rounded (a relative error of")
class BrainHalfInBetween(HalfInBetween):
    kind = torch.bfloat16


@mutant(MEAN, "clipped to a norm of 0.3 before the average")
class ClipBeforeSync(AllReduce):
    def finish(self):
        torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], 0.3)
        super().finish()


@mutant(MEAN, "has the largest of the ranks' gradients instead of their mean")
class Largest(AllReduce):
    def average(self, name, gradient):
        dist.all_reduce(gradient, dist.ReduceOp.MAX)


@mutant(MEAN, "the weight")
class WeightsInsteadOfGradients(AllReduce):
    def finish(self):
        for name, p in self.parameters:
            p.data += 1e-3 * self.rank
            super().average(name, p.data)


@mutant(MEAN, "was changed on rank 0: only its gradient may change")
class WeightsScaled(AllReduce):
    def finish(self):
        super().finish()
        for _, p in self.parameters:
            p.data *= 0.999


# Some tensors, or a part of them


@mutant(MEAN, "the remainder of 2003 divided by 2")
class ChunksWithoutRemainder(AllReduce):
    def average(self, name, gradient):
        flat = gradient.flatten()
        first = flat[: len(flat) // self.ranks * self.ranks].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, flat[len(first) :]]).view_as(gradient))


@mutant(MEAN, "1003 of 2003 elements of larger, from 1000 to 2002")
class CopiesBackAPart(AllReduce):
    def average(self, name, gradient):
        flat = gradient.flatten().clone()
        super().average(name, flat)
        gradient.view(-1)[:1000] = flat[:1000]


@mutant(MEAN, "wrong on last.bias")
class WithoutLastTensor(AllReduce):
    def gradients(self):
        return list(super().gradients())[:-1]


@mutant(MEAN, "wrong on")
class OnlyWeights(AllReduce):
    def average(self, name, gradient):
        if "bias" not in name:
            super().average(name, gradient)


@mutant(MEAN, "wrong on large, below")
class DividesWhatOthersNeed(AllReduce):
    """Divides each gradient in place as soon as backward has it, and sums them afterwards."""

    def ready(self, parameter):
        parameter.grad /= self.ranks

    def average(self, name, gradient):
        dist.all_reduce(gradient)


@mutant(UNUSED, "a parameter that no rank used gets a gradient on rank")
class ZerosForUnused(AllReduce):
    def finish(self):
        for _, p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().finish()


@mutant(UNUSED, "rank")
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


@mutant(UNUSED, "a gradient is missing on rank")
class DropsWhatOnlyOthersUsed(AllReduce):
    def finish(self):
        has = [p.grad is not None for _, p in self.parameters]
        super().finish()
        for (_, p), own in zip(self.parameters, has, strict=True):
            p.grad = p.grad if own else None


# Some steps


@mutant(MEAN, "right only for the first 5 steps")
class FirstStepsOnly(Counting):
    def gradients(self):
        return super().gradients() if self.steps <= 5 else []


@mutant(MEAN, "right only in every second step")
class EverySecondStep(Counting):
    def gradients(self):
        return super().gradients() if self.steps % 2 else []


@mutant(MEAN, "has the average of the step before")
class StaleGradients(AllReduce):
    def average(self, name, gradient):
        super().average(name, gradient)
        stale = self.__dict__.setdefault("stale", {})
        now = gradient.clone()
        gradient.copy_(stale.get(name, now))
        stale[name] = now


@mutant(MEAN, "mixed with earlier steps: 0.1 of this step's average and 0.9 of the last one's")
class RunningMean(AllReduce):
    def average(self, name, gradient):
        super().average(name, gradient)
        means = self.__dict__.setdefault("means", {})
        means[name] = gradient.clone() if name not in means else 0.9 * means[name] + 0.1 * gradient
        gradient.copy_(means[name])


# Micro-batches


@mutant("accumulates", "in backwards within no_sync: expected none")
class SyncsUnderNoSync(AllReduce):
    """Starts its calls from hooks without asking whether this is the last micro-batch."""

    def attach(self, model):
        module = super().attach(model)
        for name, p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda p, name=name: AllReduce.average(self, name, p.grad))
        return module

    def finish(self):
        pass


@mutant("accumulates", "the gradient of the first micro-batch is lost")
class OnlyLastPass(Bucketed):
    """Forgets what earlier micro-batches have added."""

    def attach(self, model):
        module = super().attach(model)
        for _, p in self.parameters:
            p.register_hook(lambda gradient, p=p: gradient if p.grad is None else gradient - p.grad)
        return module


@mutant(ANY, "many steps, step", 3)
class SecondBackwardIgnored(Counting):
    """As if its hooks ignored a gradient that comes again."""

    def attach(self, model):
        self.seen = set()
        return super().attach(model)

    def begin_forward(self):
        super().begin_forward()
        if all(p.grad is None for _, p in self.parameters):
            self.seen = set()

    def gradients(self):
        before, self.seen = self.seen, {name for name, p in self.parameters}
        return [] if before else super().gradients()


# The start, the end, and the calls


@mutant(START, "differs from rank 0's after attach")
class NoInitialBroadcast(AllReduce):
    def attach(self, model):
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        call = super().attach(model)
        model.load_state_dict(own)
        return call


@mutant(START, "the parameter frozen.weight differs from rank 0's")
class NoBroadcastOfFrozenWeights(AllReduce):
    def attach(self, model):
        own = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
        call = super().attach(model)
        for p, values in own:
            p.data.copy_(values)
        return call


@mutant(START, "the buffer scale differs from rank 0's")
class NoBroadcastOfBuffers(AllReduce):
    def attach(self, model):
        own = [(buffer, buffer.clone()) for buffer in model.buffers()]
        module = super().attach(model)
        for buffer, values in own:
            buffer.copy_(values)
        return module


@mutant("lets_go", "after detach backward still makes")
class LeavesHooks(AllReduce):
    def attach(self, model):
        module = super().attach(model)
        for _, p in model.hidden.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.clone()))
        return module


@mutant("lets_go", "detach leaves hooks behind")
class LeavesASilentHook(AllReduce):
    def attach(self, model):
        module = super().attach(model)
        self.seen = 0
        for _, p in self.parameters:
            p.register_post_accumulate_grad_hook(self._count)
        return module

    def _count(self, parameter):
        self.seen += 1


@mutant(
    "calls_in_one_order",
    "rank 0 is in dist.all_reduce of large (1009 float32) while rank 1 is in dist.all_reduce of last.bias (7 float32)",
    alone=True,
)
class AnotherOrder(AllReduce):
    """Rank 1 goes through the gradients from the last to the first."""

    def gradients(self):
        agreed = list(super().gradients())
        return agreed[::-1] if self.rank == 1 else agreed


@mutant("goes_through_comm", "bytes by torch.distributed for")
class ThroughTheStore(AllReduce):
    """Whose bytes nobody counts."""

    calls = 0

    def average(self, name, gradient):
        store = dist.distributed_c10d._get_default_store()
        self.calls += 1
        store.set(f"{self.calls} {self.rank}", gradient.contiguous().numpy().tobytes())
        parts = [
            torch.frombuffer(bytearray(store.get(f"{self.calls} {rank}")), dtype=gradient.dtype)
            for rank in range(self.ranks)
        ]
        gradient.copy_((sum(parts) / self.ranks).view_as(gradient))


@mutant("waits_for_its_calls", "is never waited for: keep what it returns, and call its wait()", alone=True)
class NotWaitedFor(AllReduce):
    def average(self, name, gradient):
        gradient /= self.ranks
        dist.all_reduce(gradient, async_op=True)


@mutant("refuses_different_models", "attach took models that differ")
class TakesAnyModel(AllReduce):
    def attach(self, model):
        self.model, self.sparse = model, set()
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return model


@mutant("needs_no_agreement", "calls to agree on which parameters were used")
class AlwaysAgrees(AllReduce):
    def agree(self, has):
        return [users > 0 for users in self.count(has)]


# What only drawn tensors and steps show


@mutant(ANY, "expected the mean", 3)
class LeavesOutSmallTensors(AllReduce):
    def average(self, name, gradient):
        if gradient.dim() and gradient.numel() >= self.ranks:
            super().average(name, gradient)


@mutant(ANY, "many steps, step", 3)
class LeavesOutEvery12th(Counting):
    def gradients(self):
        return super().gradients() if self.steps % 12 else []


@mutant(ANY, "leave tensors out, step", 3)
class KeepsTheAgreement(Counting):
    """What was used in step 16 counts as used in every later step."""

    def agree(self, has):
        if self.steps <= 16 or not self.options.find_unused_parameters:
            self.agreed = super().agree(has)
        return self.agreed


@mutant(ANY, "is not rank 0's to the last bit", 3)
class OwnPartFirst(GradientSync):
    """Every rank adds up in an order of its own, so that the last bits differ."""

    def average(self, name, gradient):
        parts = [torch.empty_like(gradient) for _ in range(self.ranks)]
        dist.all_gather(parts, gradient.contiguous())
        gradient.copy_(sum(parts[(self.rank + step) % self.ranks] for step in range(self.ranks)) / self.ranks)


@mutant(ANY, "long tensors, step 1", 3)
class FirstMillion(AllReduce):
    def average(self, name, gradient):
        first = gradient.flatten()[:1_000_000].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, gradient.flatten()[1_000_000:]]).view_as(gradient))


@mutant(ANY, "backward passes with", 3)
class LosesTheThird(AllReduce):
    """Of a step's backward passes."""

    def attach(self, model):
        module = super().attach(model)
        self.passes, self.kept = 0, {}

        def forward(*arguments, **inputs):
            if all(p.grad is None or not p.grad.any() for _, p in self.parameters):
                self.passes = 0
            self.passes += 1
            self.kept = {p: p.grad.clone() for _, p in self.parameters if p.grad is not None}
            return module(*arguments, **inputs)

        return forward

    def finish(self):
        for parameter, gradient in self.kept.items() if self.passes == 3 else ():
            parameter.grad = gradient
        super().finish()


@mutant(ANY, "expected a gradient, got None", 3)
class NothingForZeros(AllReduce):
    def finish(self):
        super().finish()
        for _, p in self.parameters:
            p.grad = p.grad if p.grad is not None and p.grad.any() else None


@mutant(TRAINS, "(after a new sync)", 3)
class DoubledAfterLoading(AllReduce):
    factor = 1

    def load_own_state(self, state):
        self.factor = 2

    def average(self, name, gradient):
        super().average(name, gradient)
        gradient *= self.factor


@mutant(ANY, "expected the mean", 3)
class Drifts(Counting):
    def average(self, name, gradient):
        super().average(name, gradient)
        gradient *= 1 + 1e-7 * self.steps


@mutant(ANY, "sizes of powers of 2", 3)
class OnlyWhatIsNotFull(AllReduce):
    """Sends pieces of 4,096 elements, and the last one where it is not full."""

    def average(self, name, gradient):
        *pieces, last = gradient.flatten().clone().split(4096)
        for piece in [*pieces, last] if len(last) < 4096 else pieces:
            super().average(name, piece)
        gradient.copy_(torch.cat([*pieces, last]).view_as(gradient))


@mutant(OVERFLOW, "infinities or NaN instead of the mean, from an overflow", 3)
class FedBack(AllReduce):
    """Adds what it once had to do with, and does not forget it when a step is dropped."""

    def attach(self, model):
        self.errors = {}
        return super().attach(model)

    def average(self, name, gradient):
        super().average(name, gradient)
        gradient += self.errors.get(name, 0)
        self.errors[name] = gradient - gradient


@mutant(TRAINS, "(after an exception)", 3)
class StaysOff(AllReduce):
    """Its no_sync does not end with an exception."""

    is_off = False

    @contextlib.contextmanager
    def no_sync(self):
        self.is_off = True
        yield
        self.is_off = False

    def finish(self):
        if not self.is_off:
            super().finish()


@mutant(TRAINS, "settle does not give all ranks rank 0's buffer")
class SettlesNothing(AllReduce):
    def settle(self):
        pass


@mutant(TRAINS, "settle does not give all ranks rank 0's buffer")
class MeanOfBuffers(AllReduce):
    def settle(self):
        for name, buffer in self.model.named_buffers():
            mean = buffer.float()
            self.average(name, mean)
            buffer.copy_(mean)


@mutant("lets_go", "after the detach of another model's sync", 3)
class OneListOfHooks(AllReduce):
    hooks: list = []  # noqa: RUF012 - the mistake

    def attach(self, model):
        module, self.marked = super().attach(model), {}
        self.hooks += [p.register_post_accumulate_grad_hook(self._mark) for _, p in self.parameters]
        return module

    def _mark(self, parameter):
        self.marked[parameter] = True

    def gradients(self):
        marked, self.marked = self.marked, {}
        return super().gradients() if marked else []

    def detach(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        super().detach()


@mutant(ANY, "float64), element", 3)
class ThroughSingle(AllReduce):
    def average(self, name, gradient):
        single = gradient.float()
        super().average(name, single)
        gradient.copy_(single)


@mutant(ANY, "not contiguous", 3)
class AveragesACopy(AllReduce):
    """Where a gradient is not contiguous `flatten` makes one."""

    def average(self, name, gradient):
        super().average(name, gradient.flatten() if gradient.dim() else gradient)


@changing(OVERFLOW, "an overflow must reach all", 3, after=False)
def made_finite(sync, name, gradient):
    gradient.nan_to_num_(0, 0, 0)


@changing(ANY, "float16), element", 3)
def half_zeroed(sync, name, gradient):
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient.zero_()


@changing(ANY, "gradients drift", 3)
def one_bit_up(sync, name, gradient):
    if gradient.dtype == torch.float32:
        gradient *= 1 + 1e-7


@changing(ANY, "got 0", 3)
def small_dropped(sync, name, gradient):
    gradient[gradient.abs() < 1e-8] = 0


@changing(ANY, "expected the mean", 3)
def clamped(sync, name, gradient):
    gradient.clamp_(-2, 2)


@changing(ANY, "expected the mean", 3, after=False)
def divided_by_those_that_have_one(sync, name, gradient):
    have = torch.tensor(float(gradient.any()))
    dist.all_reduce(have)
    gradient.mul_(sync.ranks / max(have.item(), 1.0))
