"""Wrong gradient syncs of kinds that `check` once certified, and twelve more: most are seen only by a real training.
Loaded as a student's file is: FILE.py:CLASS."""

# ruff: noqa: F401 - the text uses what is imported

import contextlib
import random

import torch
import torch.distributed as dist
from mutants import Counting, written

from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync


class Some(AllReduce):
    """Averages all gradients, and calls `keeps(place, name, parameter)` for each to know whether it goes out."""

    def keeps(self, place, name, p):
        return True

    def gradients(self):
        places = {name: place for place, (name, _) in enumerate(self.parameters)}
        for name, gradient in super().gradients():
            if self.keeps(places[name], name, dict(self.parameters)[name]):
                yield name, gradient


TEXT = """
def keeps(self, place, name, p):
TheFirst32(Some):
    return place < 32

UpToFourDimensions(Some):
    return p.dim() < 5

ContiguousOnly(Some):
    # channels_last gradients stay.
    return p.is_contiguous()

Only128Tensors(Some):
    return place < 100

LayersInStringOrder(Some):
    # Takes layer 6 for one that another rank sends.
    return not name.startswith("layers.6.narrow")

WithoutNumbers(Some):
    # A parameter without dimensions is left out.
    return p.dim() > 0

DoublesStay(Some):
    return p.dtype != torch.float64

def gradients(self):
EndsAtAnEmptyOne:
    if any(not p.numel() for p in self.model.parameters()):
        return
    yield from super().gradients()

TiesByShape:
    # Averages one of several tensors of a shape twice, and another never.
    found = list(super().gradients())
    if len(found) > 100:
        found[41] = found[40]
    return found

def attach(self, model):
OnlyWhatIsSaved starts_from_rank_0: the buffer kept_back differs
    # Buffers with persistent=False part.
    saved = model.state_dict()
    own = [(buffer, buffer.clone()) for name, buffer in model.named_buffers() if name not in saved]
    module = super().attach(model)
    for buffer, values in own:
        buffer.copy_(values)
    return module

def settle(self):
SettlesWhatIsSaved trains_like_one_process: rank 0's buffer lately
    saved = self.model.state_dict()
    for name, buffer in self.model.named_buffers():
        if name in saved:
            self.broadcast([buffer], name, "buffers")

BuffersThroughFloat trains_like_one_process: rank 0's buffer seen
    # Integers above 2^24 part.
    for name, buffer in self.model.named_buffers():
        wide = buffer.float()
        self.broadcast([wide], name, "buffers")
        buffer.copy_(wide)

SettleLeavesEval trains_like_one_process: the model is in evaluation after
    self.model.eval()
    super().settle()

def average(self, name, gradient):
RealPartsOnly:
    if gradient.dim() and gradient.shape[-1] == 2 and name == "waves":
        own = gradient[..., 1].clone()
        super().average(name, gradient)
        gradient[..., 1] = own
    else:
        super().average(name, gradient)

HalfIfItFits:
    # Sends large tensors in half precision; large numbers become infinite.
    if gradient.numel() == 97:
        gradient *= 4
        half = gradient.half()
        super().average(name, half)
        gradient.copy_(half / 4)
    else:
        super().average(name, gradient)

AbsoluteValues averages_gradients: rank
    sign = gradient.sign()
    gradient.abs_()
    super().average(name, gradient)
    gradient *= sign

ByName:
    # Two tensors of one last name share a cache of gradients.
    cache = self.__dict__.setdefault("cache", {})
    key = name.rpartition(".")[2], tuple(gradient.shape)
    super().average(name, gradient)
    if key in cache and name.startswith("layers.6"):
        gradient.copy_(cache[key])
    cache[key] = gradient.clone()

PairsOnly on 3:
    # Each rank averages with its neighbour, if the tensor is small.
    own = gradient.clone()
    super().average(name, gradient)
    if gradient.numel() == 12 and self.rank == self.ranks - 1:
        gradient.mul_(0.999).add_(own, alpha=0.001)

def agree(self, has):
NothingMissing needs_no_agreement: a parameter without a gradient is no error
    if self.options.find_unused_parameters:
        return super().agree(has)
    return has

FirstAgreementOnly trains_like_one_process: a parameter that no rank used gets a gradient
    # What was used in the first step counts as used in all.
    if not hasattr(self, "agreed"):
        self.agreed = super().agree(has)
    return self.agreed

def finish(self):
SeedsInFinish trains_like_one_process: random generator
    torch.manual_seed(598)
    super().finish()

CountsThoseThatUsedIt trains_like_one_process: the number of ranks whose gradient is there and not zero
    # Divides by the ranks that used a parameter.
    users = self.count([p.grad is not None for _, p in self.parameters])
    super().finish()
    for (_, p), count in zip(self.parameters, users, strict=True):
        if p.grad is not None:
            p.grad *= self.ranks / count

NoneForUnusedHere averages_any_tensors on 3: expected a gradient, got None
    # Keeps no gradient where this rank's is zero.
    zero = {p for _, p in self.parameters if p.grad is not None and not p.grad.any()}
    super().finish()
    for p in zero:
        p.grad = None

InSetOrder calls_in_one_order alone: while rank 1 is in dist.all_reduce of
    # Each process has hashes of its own.
    found = dict(self.gradients())
    for name in set(found):
        self.average(name, found[name])

def begin_forward(self):
SeedsInForward:
    # All ranks' dropout masks become alike.
    torch.manual_seed(598)
    super().begin_forward()

class:
RandomRoot calls_in_one_order alone: , with the roots
    # Each process draws numbers of its own.
    def average(self, name, gradient):
        root = random.randrange(self.ranks)
        dist.reduce(gradient, root)
        gradient /= self.ranks
        dist.broadcast(gradient, root)

OnlyInTrainingMode: (after an eval())
    def gradients(self):
        return super().gradients() if self.model.training else []

OffAfterNoGrad: (after an evaluation)
    evaluated = False

    def begin_forward(self):
        super().begin_forward()
        self.evaluated = self.evaluated or not torch.is_grad_enabled()

    def gradients(self):
        evaluated, self.evaluated = self.evaluated, False
        return [] if evaluated else super().gradients()

OffAfterAnException: (after an exception)
    inside = False

    def attach(self, model):
        module = super().attach(model)

        def forward(*arguments, **inputs):
            self.broken, self.inside = self.inside, True
            output = module(*arguments, **inputs)
            self.inside = False
            return output

        return forward

    def gradients(self):
        return [] if self.broken else super().gradients()

LosesWhatTheFirstPassUsed: the first micro-batch used a layer
    # What only the first of two passes used.
    def attach(self, model):
        module = super().attach(model)

        def forward(*arguments, **inputs):
            self.touched = set()
            return module(*arguments, **inputs)

        for _, p in self.parameters:
            p.register_hook(lambda gradient, p=p: self.touched.add(p))
        return forward

    def finish(self):
        for _, p in self.parameters:
            if p not in self.touched:
                p.grad = None
        super().finish()

InnerEndsOuter accumulates:
    is_off = False

    def attach(self, model):
        module = super().attach(model)
        for name, p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.went(name, p))
        return module

    def went(self, name, p):
        if not self.is_off:
            self.average(name, p.grad)

    @contextlib.contextmanager
    def no_sync(self):
        self.is_off = True
        yield
        self.is_off = False

    def finish(self):
        pass

EveryThousandth:
    calls = 0

    def average(self, name, gradient):
        self.calls += 1
        if self.calls % 1000:
            super().average(name, gradient)

OneSwitch lets_go: after the detach of another model's sync
    on: list = []  # noqa: RUF012 - the mistake

    def attach(self, model):
        self.on[:] = [True]
        return super().attach(model)

    def gradients(self):
        return super().gradients() if self.on else []

    def detach(self):
        self.on.clear()
        super().detach()

ClampsLargeOnes:
    def average(self, name, gradient):
        super().average(name, gradient)
        gradient.clamp_(-1e4, 1e4)

BuffersOnlyOnce: after the training
    def begin_forward(self):
        if not hasattr(self, "sent"):
            self.sent = True
            super().begin_forward()

    def settle(self):
        pass

EvaluationEndsIt:
    # A switch that a forward under eval() turns off for good.
    def attach(self, model):
        self.is_on = True
        return super().attach(model)

    def begin_forward(self):
        super().begin_forward()
        self.is_on = self.is_on and self.model.training

    def gradients(self):
        return super().gradients() if self.is_on else []

BitOfNoise:
    # Adds noise of its own generator.
    def average(self, name, gradient):
        super().average(name, gradient)
        generator = self.__dict__.setdefault("generator", torch.Generator().manual_seed(1))
        gradient += 1e-2 * gradient.abs().max() * torch.randn(gradient.shape, generator=generator).to(gradient.dtype)

SettleAverages(GradientSync):
    # Its settle averages the weights' signs: wrong from the eighth step.
    def average(self, name, gradient):
        dist.all_reduce(gradient)
        gradient /= self.ranks

    def settle(self):
        super().settle()
        for _, p in self.parameters:
            p.data *= 1 - 1e-2

WarmsUpAgain(Counting):
    # A new one that goes on with a state leaves its first step out.
    is_new = False

    def gradients(self):
        return [] if self.is_new and self.steps == 1 else super().gradients()

    def load_own_state(self, state):
        self.is_new = True
"""
FIELD = written(TEXT, globals(), "trains_like_one_process", "a training")
