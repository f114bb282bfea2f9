"""Gradient syncs, each with one silent mistake that only what is drawn shows: sizes, dtypes, steps, faults, memory."""

import contextlib
import functools

import torch
from mutants import Mutant, mutant

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync

ANY, MANY, OVERFLOW = "averages_any_tensors", "averages_many_steps", "passes_overflow_on"
STATE, APART, SETTLES, MEMORY = "goes_on_from_its_state", "keeps_models_apart", "settles_buffers", "frees_memory"
DRAWN: dict[str, Mutant] = {}
drawn = functools.partial(mutant, world_sizes=(3,), into=DRAWN)


def changing(name, claim, says, cause, after=True):
    """Enters a sync that averages, and calls the function that it decorates after each average, or before it."""

    def enter(change):
        @drawn(name, claim, says, cause)
        class Averaging(AllReduce):
            def average(self, name, gradient):
                if not after:
                    change(self, name, gradient)
                super().average(name, gradient)
                if after:
                    change(self, name, gradient)

        return change

    return enter


@drawn("small tensors left out", ANY, "expected the mean", "elements and fewer")
class LeavesOutSmallTensors(AllReduce):
    def average(self, name, gradient):
        if gradient.dim() and gradient.numel() >= self.comm.world_size:
            super().average(name, gradient)


class CountsSteps(AllReduce):
    steps = 0

    def finish(self):
        self.steps += 1
        super().finish()


@drawn("every 12th step", MANY, "step 12 of", "wrong only in every 12th step")
class LeavesOutEvery12th(CountsSteps):
    def gradients(self):
        return super().gradients() if self.steps % 12 else []


@drawn("the agreement is kept", MANY, "leave tensors out, step", "")
class KeepsTheAgreement(CountsSteps):
    """What was used in step 16 counts as used in every later step."""

    def agree_on_used(self, has):
        if self.steps <= 16 or not self.find_unused_parameters:
            self.agreed = super().agree_on_used(has)
        return self.agreed


@drawn("each rank its own order", MANY, "is not rank 0's to the last bit", "in their last bits")
class OwnPartFirst(GradientSync):
    """Every rank adds up in an order of its own, so that the last bits differ."""

    def average(self, name, gradient):
        parts, call = self.comm.all_gather(gradient.contiguous(), name)
        call.wait()
        total = torch.zeros_like(gradient)
        for step in range(self.comm.world_size):
            total += parts[(self.comm.rank + step) % self.comm.world_size]
        gradient.copy_(total / self.comm.world_size)


@drawn("the first million", ANY, "long tensors, one step", "only the first 1000000 of")
class FirstMillion(AllReduce):
    def average(self, name, gradient):
        first = gradient.flatten()[:1_000_000].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, gradient.flatten()[1_000_000:]]).view_as(gradient))


@drawn("settles nothing", SETTLES, "after settle (2 steps): expected rank 0's", "settle does not")
class SettlesNothing(AllReduce):
    def settle(self):
        pass


@drawn("third pass lost", MANY, "3 backward passes", "wrong only in steps with 3 backward passes")
class LosesTheThird(AllReduce):
    """Of a step's backward passes."""

    def attach(self, model):
        module = super().attach(model)
        self.passes, self.kept = 0, {}

        def forward(*arguments, **inputs):
            outputs = module(*arguments, **inputs)
            outputs[0].register_hook(self._begin_backward)
            return outputs

        return forward

    def _begin_backward(self, _):
        self.passes += 1
        if self.passes == 3:
            self.kept = {p: p.grad.clone() for _, p in self.parameters if p.grad is not None}

    def finish(self):
        for parameter, gradient in self.kept.items() if self.passes == 3 else ():
            parameter.grad = gradient
        self.passes, self.kept = 0, {}
        super().finish()


@drawn("None for zeros", ANY, "expected a gradient, got None", "only on tensors whose gradient is zero")
class NothingForZeros(AllReduce):
    def finish(self):
        super().finish()
        for _, p in self.parameters:
            p.grad = p.grad if p.grad is not None and p.grad.any() else None


@drawn("doubled after loading", STATE, "expected the mean", "wrong only in steps after load_own_state")
class DoubledAfterLoading(AllReduce):
    factor = 1

    def load_own_state(self, facts, tensors):
        self.factor = 2

    def average(self, name, gradient):
        super().average(name, gradient)
        gradient *= self.factor


@drawn("always finite", OVERFLOW, "agree_on_finite(False) returned True", "agree_on_finite does not")
class AlwaysFinite(AllReduce):
    def agree_on_finite(self, is_finite):
        return True


@drawn("keeps every gradient", MEMORY, "expected none more", "memory grows from step to step")
class KeepsEveryGradient(AllReduce):
    def attach(self, model):
        self.history = []
        return super().attach(model)

    def average(self, name, gradient):
        super().average(name, gradient)
        self.history.append(gradient.numpy().copy())

    def detach(self):
        self.history = []
        super().detach()


@drawn("keeps its buffers", MEMORY, "after detach 640,000 bytes", "after detach it still holds")
class KeepsItsBuffers(AllReduce):
    def attach(self, model):
        self.latest = {}
        return super().attach(model)

    def average(self, name, gradient):
        super().average(name, gradient)
        self.latest[name] = gradient.clone()


@drawn("drifts", MANY, "expected the mean", "a relative error of")
class Drifts(CountsSteps):
    def average(self, name, gradient):
        super().average(name, gradient)
        gradient *= 1 + 1e-7 * self.steps


@drawn("full last piece left out", ANY, "sizes of powers of 2", "only with sizes of powers of 2")
class OnlyWhatIsNotFull(AllReduce):
    """Sends pieces of 4,096 elements, and the last one where it is not full."""

    def average(self, name, gradient):
        *pieces, last = gradient.flatten().clone().split(4096)
        for piece in [*pieces, last] if len(last) < 4096 else pieces:
            super().average(name, piece)
        gradient.copy_(torch.cat([*pieces, last]).view_as(gradient))


@drawn("errors fed back", OVERFLOW, "got nan", "infinities or NaN instead of the mean")
class FedBack(AllReduce):
    """Adds what it once had to do with, and does not forget it when a step is dropped."""

    def attach(self, model):
        self.errors = {}
        return super().attach(model)

    def average(self, name, gradient):
        super().average(name, gradient)
        gradient += self.errors.get(name, 0)
        self.errors[name] = gradient - gradient

    def detach(self):
        self.errors = {}
        super().detach()


@drawn("no_sync stays", MANY, "expected the mean", "after an exception within no_sync")
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


@drawn("one list of hooks", APART, "after the first's detach", "after the first's detach")
class OneListOfHooks(AllReduce):
    hooks: list = []  # noqa: RUF012 - the mistake

    def attach(self, model):
        module, self.ready = super().attach(model), {}
        self.hooks += [p.register_post_accumulate_grad_hook(self._mark) for _, p in self.parameters]
        return module

    def _mark(self, parameter):
        self.ready[parameter] = True

    def gradients(self):
        ready, self.ready = self.ready, {}
        return super().gradients() if ready else []

    def detach(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.ready = {}
        super().detach()


@drawn("attaches once", APART, "after detach and attach", "another weight than rank 0's")
class AttachesOnce(AllReduce):
    is_attached = False

    def attach(self, model):
        self._model = model
        if not self.is_attached:
            super().attach(model)
        self.is_attached = True
        return model

    def detach(self):
        self._model = None


@drawn("mean of buffers", SETTLES, "expected rank 0's", "settle does not give all ranks rank 0's")
class MeanOfBuffers(AllReduce):
    def settle(self):
        for name, buffer in self._model.named_buffers():
            mean = buffer.float()
            AllReduce.average(self, name, mean)
            buffer.copy_(mean)


@drawn("float64 through float32", ANY, "float64), element", "wrong on those of float64")
class ThroughSingle(AllReduce):
    def average(self, name, gradient):
        single = gradient.float()
        super().average(name, single)
        gradient.copy_(single)


@drawn("a copy is averaged", ANY, "not contiguous", "only with tensors that are not contiguous")
class AveragesACopy(AllReduce):
    """Where a gradient is not contiguous `flatten` makes one."""

    def average(self, name, gradient):
        super().average(name, gradient.flatten() if gradient.dim() else gradient)


@changing("infinite becomes 0", OVERFLOW, "expected the mean", "an overflow", after=False)
def made_finite(sync, name, gradient):
    gradient.nan_to_num_(0, 0, 0)


@changing("half precision zeroed", ANY, "float16), element", "wrong on those of float16")
def half_zeroed(sync, name, gradient):
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient.zero_()


@changing(
    "last rank left out under a scale",
    MANY,
    "loss_scale",
    "rank 2's gradient is not in the average (wrong only in steps where loss_scale is not 1)",
    after=False,
)
def last_left_out_under_scale(sync, name, gradient):
    if sync.loss_scale != 1 and sync.comm.rank == sync.comm.world_size - 1:
        gradient.zero_()


@changing("one bit up", MANY, "gradients drift", "gradients drift")
def one_bit_up(sync, name, gradient):
    if gradient.dtype == torch.float32:
        gradient *= 1 + 1e-7


@changing("small numbers dropped", ANY, "got 0", "zeros instead of the mean")
def small_dropped(sync, name, gradient):
    gradient[gradient.abs() < 1e-8] = 0


@changing("clamped after the average", ANY, "expected the mean", "are cut to it")
def clamped(sync, name, gradient):
    gradient.clamp_(-2, 2)


@changing(
    "divided by fewer ranks",
    MANY,
    "expected the mean",
    "the number of ranks whose gradient is there and not zero",
    after=False,
)
def divided_by_those_that_have_one(sync, name, gradient):
    have = torch.tensor(float(gradient.any()))
    sync.comm.all_reduce(have, "those that have one")
    gradient.mul_(sync.comm.world_size / max(have.item(), 1.0))
