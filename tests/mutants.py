"""Gradient syncs, each with one mistake that is made in practice. `check` must refuse every one, by the test that sees
it. This file is loaded as a student's is: FILE.py:CLASS."""

# ruff: noqa: F401 - the text uses what is imported

import contextlib
import re
import textwrap
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.bucketed import Bucketed


@dataclass(frozen=True)
class Mutant:
    """`test` must refuse it on n ranks, with `says` in the sentence. alone: it ends its world, so it gets its own."""

    test: str
    says: str
    n: int = 2
    alone: bool = False


HEAD = re.compile(r"(\w+)(?:\((\w+)\))?(?: (?!on \d|alone)(\w+))?(?: on (\d))?( alone)?:(?: (.*))?")


def written(text: str, names: dict, test: str = "", says: str = "") -> dict[str, Mutant]:
    """Make the classes that a text describes, in a module's `names`, with its own names. It has:

    def METHOD(...):                what the following classes replace; "class:" if their bodies are whole
    NAME(BASE) TEST on N: SAYS      a class, by default of all_reduce; its body follows
    """
    found, method = {}, ""
    for block in re.split(r"\n\n(?=\S)", text.strip()):
        head, _, body = block.partition("\n")
        if head.startswith(("def ", "class:")):
            method = head.removeprefix("class:")
            head, _, body = body.partition("\n")
        name, base, its_test, n, is_alone, its_says = HEAD.fullmatch(head).groups("")
        body = f"    {method}\n{textwrap.indent(body, '    ')}" if method else body
        code = f"class {name}({base or 'AllReduce'}):\n{body}\n"
        exec(compile(code, names["__file__"], "exec"), names)
        found[name] = Mutant(its_test or test, its_says or ("" if its_test else says), int(n or 2), bool(is_alone))
    return found


class Counting(AllReduce):
    """Knows the number of its step."""

    steps = 0

    def finish(self):
        self.steps += 1
        super().finish()


TEXT = """
def average(self, name, gradient):
SumNotMean averages_gradients: the sum over 2 ranks, not their average: divide by n
    dist.all_reduce(gradient)

SumInHalfPrecision averages_gradients: the sum over 2 ranks
    # Two mistakes: the larger one is named.
    half = gradient.half()
    dist.all_reduce(half)
    gradient.copy_(half)

DividedByTwo averages_gradients on 3: divided by the wrong number? by 2 on 3 ranks
    dist.all_reduce(gradient)
    gradient /= 2

DividedByFour averages_gradients on 3: divided by the wrong number? by 4 on 3 ranks
    dist.all_reduce(gradient)
    gradient /= 4

divided_twice averages_gradients: the average divided by n a second time
    super().average(name, gradient)
    gradient /= self.ranks

GatherWithoutScatter averages_gradients: and the average was not sent back
    copies = [torch.empty_like(gradient) for _ in range(self.ranks)] if self.rank == 0 else None
    dist.gather(gradient, copies)
    if copies:
        gradient.copy_(sum(copies) / self.ranks)

WithoutLastRank averages_gradients on 3: rank 2's gradient is not in the average
    if self.rank == self.ranks - 1:
        gradient.zero_()
    super().average(name, gradient)

Largest averages_gradients: has the largest of the ranks' gradients instead of their mean
    dist.all_reduce(gradient, dist.ReduceOp.MAX)

ChunksWithoutRemainder averages_gradients: the remainder of 2003 divided by 2
    flat = gradient.flatten()
    first = flat[: len(flat) // self.ranks * self.ranks].clone()
    super().average(name, first)
    gradient.copy_(torch.cat([first, flat[len(first) :]]).view_as(gradient))

CopiesBackAPart averages_gradients: 1003 of 2003 elements of larger, from 1000 to 2002
    flat = gradient.flatten().clone()
    super().average(name, flat)
    gradient.view(-1)[:1000] = flat[:1000]

OnlyWeights averages_gradients: wrong on
    if "bias" not in name:
        super().average(name, gradient)

StaleGradients averages_gradients: has the average of the step before
    super().average(name, gradient)
    stale = self.__dict__.setdefault("stale", {})
    now = gradient.clone()
    gradient.copy_(stale.get(name, now))
    stale[name] = now

RunningMean averages_gradients: mixed with earlier steps: 0.1 of this step's average and 0.9 of the last one's
    super().average(name, gradient)
    means = self.__dict__.setdefault("means", {})
    means[name] = gradient.clone() if name not in means else 0.9 * means[name] + 0.1 * gradient
    gradient.copy_(means[name])

LeavesOutSmallTensors averages_any_tensors on 3: expected the mean
    if gradient.dim() and gradient.numel() >= self.ranks:
        super().average(name, gradient)

OwnPartFirst(GradientSync) averages_any_tensors on 3: is not rank 0's to the last bit
    # Every rank adds up in an order of its own, so that the last bits differ.
    parts = [torch.empty_like(gradient) for _ in range(self.ranks)]
    dist.all_gather(parts, gradient.contiguous())
    gradient.copy_(sum(parts[(self.rank + step) % self.ranks] for step in range(self.ranks)) / self.ranks)

FirstMillion averages_any_tensors on 3: long tensors, step 1
    first = gradient.flatten()[:1_000_000].clone()
    super().average(name, first)
    gradient.copy_(torch.cat([first, gradient.flatten()[1_000_000:]]).view_as(gradient))

Drifts(Counting) averages_any_tensors on 3: expected the mean
    super().average(name, gradient)
    gradient *= 1 + 1e-7 * self.steps

OnlyWhatIsNotFull averages_any_tensors on 3: sizes of powers of 2
    # Sends pieces of 4,096 elements, and the last one where it is not full.
    *pieces, last = gradient.flatten().clone().split(4096)
    for piece in [*pieces, last] if len(last) < 4096 else pieces:
        super().average(name, piece)
    gradient.copy_(torch.cat([*pieces, last]).view_as(gradient))

ThroughSingle averages_any_tensors on 3: float64), element
    single = gradient.float()
    super().average(name, single)
    gradient.copy_(single)

AveragesACopy averages_any_tensors on 3: not contiguous
    # Where a gradient is not contiguous `flatten` makes one.
    super().average(name, gradient.flatten() if gradient.dim() else gradient)

made_finite passes_overflow_on on 3: an overflow must reach all
    gradient.nan_to_num_(0, 0, 0)
    super().average(name, gradient)

half_zeroed averages_any_tensors on 3: float16), element
    super().average(name, gradient)
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient.zero_()

one_bit_up averages_any_tensors on 3: gradients drift
    super().average(name, gradient)
    if gradient.dtype == torch.float32:
        gradient *= 1 + 1e-7

small_dropped averages_any_tensors on 3: got 0
    super().average(name, gradient)
    gradient[gradient.abs() < 1e-8] = 0

clamped averages_any_tensors on 3: expected the mean
    super().average(name, gradient)
    gradient.clamp_(-2, 2)

divided_by_those_that_have_one averages_any_tensors on 3: expected the mean
    have = torch.tensor(float(gradient.any()))
    dist.all_reduce(have)
    gradient.mul_(self.ranks / max(have.item(), 1.0))
    super().average(name, gradient)

def finish(self):
NeverAveraged averages_gradients: keeps its own gradient, not the average
    pass

ClipBeforeSync averages_gradients: clipped to a norm of 0.3 before the average
    torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], 0.3)
    super().finish()

WeightsInsteadOfGradients averages_gradients: the weight
    for name, p in self.parameters:
        p.data += 1e-3 * self.rank
        super().average(name, p.data)

WeightsScaled averages_gradients: was changed on rank 0: only its gradient may change
    super().finish()
    for _, p in self.parameters:
        p.data *= 0.999

ZerosForUnused handles_unused_parameters: a parameter that no rank used gets a gradient on rank
    for _, p in self.parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    super().finish()

OnlyWhatRank0Used handles_unused_parameters: rank
    # Every rank sends what it has a gradient of, side by side.
    gradients = [p.grad for _, p in self.parameters if p.grad is not None and p.dtype == torch.float32]
    flat = torch.zeros(3_500)
    flat[: sum(gradient.numel() for gradient in gradients)] = torch.cat([each.flatten() for each in gradients])
    super().average("side by side", flat)
    super().average("precise", dict(self.parameters)["precise"].grad)
    for gradient in gradients:
        gradient.copy_(flat[: gradient.numel()].view_as(gradient))
        flat = flat[gradient.numel() :]

DropsWhatOnlyOthersUsed handles_unused_parameters: a gradient is missing on rank
    has = [p.grad is not None for _, p in self.parameters]
    super().finish()
    for (_, p), own in zip(self.parameters, has, strict=True):
        p.grad = p.grad if own else None

NothingForZeros averages_any_tensors on 3: expected a gradient, got None
    super().finish()
    for _, p in self.parameters:
        p.grad = p.grad if p.grad is not None and p.grad.any() else None

def gradients(self):
WithoutLastTensor averages_gradients: wrong on last.bias
    return list(super().gradients())[:-1]

FirstStepsOnly(Counting) averages_gradients: right only for the first 5 steps
    return super().gradients() if self.steps <= 5 else []

EverySecondStep(Counting) averages_gradients: right only in every second step
    return super().gradients() if self.steps % 2 else []

LeavesOutEvery12th(Counting) averages_any_tensors on 3: many steps, step
    return super().gradients() if self.steps % 12 else []

def attach(self, model):
OnlyLastPass(Bucketed) accumulates: the gradient of the first micro-batch is lost
    # Forgets what earlier micro-batches have added.
    module = super().attach(model)
    for _, p in self.parameters:
        p.register_hook(lambda gradient, p=p: gradient if p.grad is None else gradient - p.grad)
    return module

NoInitialBroadcast starts_from_rank_0: differs from rank 0's after attach
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    call = super().attach(model)
    model.load_state_dict(own)
    return call

NoBroadcastOfFrozenWeights starts_from_rank_0: the parameter frozen.weight differs from rank 0's
    own = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
    call = super().attach(model)
    for p, values in own:
        p.data.copy_(values)
    return call

NoBroadcastOfBuffers starts_from_rank_0: the buffer scale differs from rank 0's
    own = [(buffer, buffer.clone()) for buffer in model.buffers()]
    module = super().attach(model)
    for buffer, values in own:
        buffer.copy_(values)
    return module

LeavesHooks lets_go: after detach backward still makes
    module = super().attach(model)
    for _, p in model.hidden.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.clone()))
    return module

TakesAnyModel refuses_different_models: attach took models that differ
    self.model = model
    self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return model

def agree(self, has):
AlwaysAgrees needs_no_agreement: calls to agree on which parameters were used
    return [users > 0 for users in self.count(has)]

KeepsTheAgreement(Counting) averages_any_tensors on 3: leave tensors out, step
    # What was used in step 16 counts as used in every later step.
    if self.steps <= 16 or not self.options.find_unused_parameters:
        self.agreed = super().agree(has)
    return self.agreed

def settle(self):
SettlesNothing trains_like_one_process: settle does not give all ranks rank 0's buffer
    pass

MeanOfBuffers trains_like_one_process: settle does not give all ranks rank 0's buffer
    for name, buffer in self.model.named_buffers():
        mean = buffer.float()
        self.average(name, mean)
        buffer.copy_(mean)

class:
HalfInBetween averages_gradients: is rounded (a relative error of
    kind = torch.float16

    def average(self, name, gradient):
        half = gradient.to(self.kind)
        super().average(name, half)
        gradient.copy_(half)

BrainHalfInBetween(HalfInBetween) averages_gradients: is rounded (a relative error of
    kind = torch.bfloat16

DividesWhatOthersNeed averages_gradients: wrong on large, twin, below
    # Divides each gradient in place as soon as backward has it, and sums them afterwards.
    def ready(self, parameter):
        parameter.grad /= self.ranks

    def average(self, name, gradient):
        dist.all_reduce(gradient)

SyncsUnderNoSync accumulates: in backwards within no_sync: expected none
    # Starts its calls from hooks without asking whether this is the last micro-batch.
    def attach(self, model):
        module = super().attach(model)
        for name, p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda p, name=name: AllReduce.average(self, name, p.grad))
        return module

    def finish(self):
        pass

SecondBackwardIgnored(Counting) averages_any_tensors on 3: many steps, step
    # As if its hooks ignored a gradient that comes again.
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

LeavesASilentHook lets_go: detach leaves hooks behind
    def attach(self, model):
        module = super().attach(model)
        self.seen = 0
        for _, p in self.parameters:
            p.register_post_accumulate_grad_hook(self._count)
        return module

    def _count(self, parameter):
        self.seen += 1

AnotherOrder calls_in_one_order alone: large (1009 float32) while rank 1 is in dist.all_reduce of last.bias (7 float32)
    # Rank 1 goes through the gradients from the last to the first.
    def gradients(self):
        agreed = list(super().gradients())
        return agreed[::-1] if self.rank == 1 else agreed

ThroughTheStore goes_through_comm: bytes by torch.distributed for
    # Whose bytes nobody counts.
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

NotWaitedFor waits_for_its_calls alone: is never waited for: keep what it returns, and call its wait()
    def average(self, name, gradient):
        gradient /= self.ranks
        dist.all_reduce(gradient, async_op=True)

LosesTheThird averages_any_tensors on 3: backward passes with
    # Of a step's backward passes.
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

DoubledAfterLoading trains_like_one_process on 3: (after a new sync)
    factor = 1

    def load_own_state(self, state):
        self.factor = 2

    def average(self, name, gradient):
        super().average(name, gradient)
        gradient *= self.factor

FedBack passes_overflow_on on 3: infinities or NaN instead of the mean, from an overflow
    # Adds what it once had to do with, and does not forget it when a step is dropped.
    def attach(self, model):
        self.errors = {}
        return super().attach(model)

    def average(self, name, gradient):
        super().average(name, gradient)
        gradient += self.errors.get(name, 0)
        self.errors[name] = gradient - gradient

StaysOff trains_like_one_process on 3: (after an exception)
    # Its no_sync does not end with an exception.
    is_off = False

    @contextlib.contextmanager
    def no_sync(self):
        self.is_off = True
        yield
        self.is_off = False

    def finish(self):
        if not self.is_off:
            super().finish()

OneListOfHooks lets_go on 3: after the detach of another model's sync
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
"""
MUTANTS = written(TEXT, globals())
