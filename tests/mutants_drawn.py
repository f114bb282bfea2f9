"""Gradient syncs, each with one silent mistake that only what is drawn shows: sizes, dtypes, steps, faults, memory."""

import contextlib

import torch
from mutants import Mutant

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync


def averaging(change, after=True):
    """A sync that averages, and calls `change(sync, name, gradient)` after each average, or before it."""

    class Averaging(AllReduce):
        def average(self, name, gradient):
            if not after:
                change(self, name, gradient)
            super().average(name, gradient)
            if after:
                change(self, name, gradient)

    return Averaging


def averaging_if(chooses):
    """A sync that averages only the gradients for which `chooses(sync, gradient)` holds."""

    class Choosing(AllReduce):
        def average(self, name, gradient):
            if chooses(self, gradient):
                super().average(name, gradient)

    return Choosing


class CountsSteps(AllReduce):
    steps = 0

    def finish(self):
        self.steps += 1
        super().finish()


class LeavesOutEvery12th(CountsSteps):
    def gradients(self):
        return super().gradients() if self.steps % 12 else []


class KeepsTheAgreement(CountsSteps):
    """What was used in step 16 counts as used in every later step."""

    def agree_on_used(self, has):
        if self.steps <= 16 or not self.find_unused_parameters:
            self.agreed = super().agree_on_used(has)
        return self.agreed


class OwnPartFirst(GradientSync):
    """Every rank adds up in an order of its own, so that the last bits differ."""

    def average(self, name, gradient):
        parts, call = self.comm.all_gather(gradient.contiguous(), name)
        call.wait()
        total = torch.zeros_like(gradient)
        for step in range(self.comm.world_size):
            total += parts[(self.comm.rank + step) % self.comm.world_size]
        gradient.copy_(total / self.comm.world_size)


class FirstMillion(AllReduce):
    def average(self, name, gradient):
        first = gradient.flatten()[:1_000_000].clone()
        super().average(name, first)
        gradient.copy_(torch.cat([first, gradient.flatten()[1_000_000:]]).view_as(gradient))


class SettlesNothing(AllReduce):
    def settle(self):
        pass


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


class NothingForZeros(AllReduce):
    def finish(self):
        super().finish()
        for _, p in self.parameters:
            p.grad = p.grad if p.grad is not None and p.grad.any() else None


class DoubledAfterLoading(AllReduce):
    factor = 1

    def load_own_state(self, facts, tensors):
        self.factor = 2

    def average(self, name, gradient):
        super().average(name, gradient)
        gradient *= self.factor


class AlwaysFinite(AllReduce):
    def agree_on_finite(self, is_finite):
        return True


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


class KeepsItsBuffers(AllReduce):
    def attach(self, model):
        self.latest = {}
        return super().attach(model)

    def average(self, name, gradient):
        super().average(name, gradient)
        self.latest[name] = gradient.clone()


class Drifts(CountsSteps):
    def average(self, name, gradient):
        super().average(name, gradient)
        gradient *= 1 + 1e-7 * self.steps


class OnlyWhatIsNotFull(AllReduce):
    """Sends pieces of 4,096 elements, and the last one where it is not full."""

    def average(self, name, gradient):
        *pieces, last = gradient.flatten().clone().split(4096)
        for piece in [*pieces, last] if len(last) < 4096 else pieces:
            super().average(name, piece)
        gradient.copy_(torch.cat([*pieces, last]).view_as(gradient))


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


class MeanOfBuffers(AllReduce):
    def settle(self):
        for name, buffer in self._model.named_buffers():
            mean = buffer.float()
            AllReduce.average(self, name, mean)
            buffer.copy_(mean)


class ThroughSingle(AllReduce):
    def average(self, name, gradient):
        single = gradient.float()
        super().average(name, single)
        gradient.copy_(single)


class AveragesACopy(AllReduce):
    """Where a gradient is not contiguous `flatten` makes one."""

    def average(self, name, gradient):
        super().average(name, gradient.flatten() if gradient.dim() else gradient)


def _made_finite(sync, name, gradient):
    gradient.nan_to_num_(0, 0, 0)


def _half_zeroed(sync, name, gradient):
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient.zero_()


def _last_left_out_under_scale(sync, name, gradient):
    if sync.loss_scale != 1 and sync.comm.rank == sync.comm.world_size - 1:
        gradient.zero_()


def _one_bit_up(sync, name, gradient):
    if gradient.dtype == torch.float32:
        gradient *= 1 + 1e-7


def _small_dropped(sync, name, gradient):
    gradient[gradient.abs() < 1e-8] = 0


def _divided_by_those_that_have_one(sync, name, gradient):
    have = torch.tensor(float(gradient.any()))
    sync.comm.all_reduce(have, "those that have one")
    gradient.mul_(sync.comm.world_size / max(have.item(), 1.0))


def _mutant(make: type[GradientSync], claim: str, says: str, cause: str) -> Mutant:
    return Mutant(lambda: make, claim, says, cause, world_sizes=(3,))


ANY, MANY, OVERFLOW = "averages_any_tensors", "averages_many_steps", "passes_overflow_on"
STATE, APART, SETTLES, MEMORY = "goes_on_from_its_state", "keeps_models_apart", "settles_buffers", "frees_memory"
DRAWN = {
    "infinite becomes 0": _mutant(averaging(_made_finite, after=False), OVERFLOW, "expected the mean", "an overflow"),
    "every 12th step": _mutant(LeavesOutEvery12th, MANY, "step 12 of", "wrong in every 12th step only"),
    "the agreement is kept": _mutant(KeepsTheAgreement, MANY, "leave tensors out, step", ""),
    "each rank its own order": _mutant(OwnPartFirst, MANY, "is not rank 0's to the last bit", "in their last bits"),
    "the first million": _mutant(FirstMillion, ANY, "long tensors, one step", "only the first 1000000 of"),
    "settles nothing": _mutant(SettlesNothing, SETTLES, "after settle (2 steps): expected rank 0's", "settle does not"),
    "third pass lost": _mutant(LosesTheThird, MANY, "3 backward passes", "wrong in steps with 3 backward passes only"),
    "half precision zeroed": _mutant(averaging(_half_zeroed), ANY, "float16), element", "wrong on those of float16"),
    "None for zeros": _mutant(NothingForZeros, ANY, "expected a gradient, got None", "of which the gradient is zero"),
    "small tensors left out": _mutant(
        averaging_if(lambda sync, gradient: gradient.dim() and gradient.numel() >= sync.comm.world_size),
        ANY,
        "expected the mean",
        "elements and fewer",
    ),
    "last rank left out under a scale": _mutant(
        averaging(_last_left_out_under_scale, after=False),
        MANY,
        "loss_scale",
        "rank 2's gradient is not in the average (wrong in steps where loss_scale is not 1 only)",
    ),
    "doubled after loading": _mutant(
        DoubledAfterLoading, STATE, "expected the mean", "steps after load_own_state only"
    ),
    "always finite": _mutant(
        AlwaysFinite, OVERFLOW, "agree_on_finite(False) returned True", "agree_on_finite does not"
    ),
    "keeps every gradient": _mutant(KeepsEveryGradient, MEMORY, "expected none more", "memory grows from step to step"),
    "keeps its buffers": _mutant(KeepsItsBuffers, MEMORY, "after detach 640,000 bytes", "after detach it still holds"),
    "drifts": _mutant(Drifts, MANY, "expected the mean", "off by a relative"),
    # Thought of later, without the claims at hand.
    "one bit up": _mutant(averaging(_one_bit_up), MANY, "gradients drift", "gradients drift"),
    "small numbers dropped": _mutant(averaging(_small_dropped), ANY, "got 0", "zeros stand where the mean belongs"),
    "full last piece left out": _mutant(
        OnlyWhatIsNotFull, ANY, "sizes of powers of 2", "only with sizes of powers of 2"
    ),
    "errors fed back": _mutant(FedBack, OVERFLOW, "got nan", "infinities or NaN stand where the mean belongs"),
    "no_sync stays": _mutant(StaysOff, MANY, "expected the mean", "after an exception within no_sync"),
    "one list of hooks": _mutant(OneListOfHooks, APART, "after the first's detach", "after the first's detach"),
    "attaches once": _mutant(AttachesOnce, APART, "after detach and attach", "another weight than rank 0's"),
    "mean of buffers": _mutant(MeanOfBuffers, SETTLES, "expected rank 0's", "settle does not give all ranks rank 0's"),
    "clamped after the average": _mutant(
        averaging(lambda sync, name, gradient: gradient.clamp_(-2, 2)), ANY, "expected the mean", "are cut to it"
    ),
    "divided by fewer ranks": _mutant(
        averaging(_divided_by_those_that_have_one, after=False),
        MANY,
        "expected the mean",
        "the number of ranks whose gradient is there and not zero",
    ),
    "float64 through float32": _mutant(ThroughSingle, ANY, "float64), element", "wrong on those of float64"),
    "a copy is averaged": _mutant(AveragesACopy, ANY, "not contiguous", "only with tensors that are not contiguous"),
}
