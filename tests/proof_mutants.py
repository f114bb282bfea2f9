"""Our engines, each with one mistake that engines are known for: tests of the proof."""

import functools
import math
import time
from dataclasses import dataclass

import torch
from mutants_drawn import DRAWN

from cos598d.errors import UserError
from cos598d.strategies.replicated import Replicated
from cos598d.strategies.zero1 import Zero1
from cos598d.strategies.zero2 import Zero2
from cos598d.sync.bucketed import Bucketed


@dataclass(frozen=True)
class Mutant:
    """A mistake, all the cases of the proof that it makes fail, and what the card says of the first of them."""

    kind: type
    fails: tuple[str, ...]
    says: str


STEPPING = (
    *("steps", "accumulation", "clipping", "no need to clip", "tied weights", "module used twice", "unused parameter"),
    *("used on one rank", "frozen parameter", "small parameters", "buffer", "uneven last batch", "all at once"),
    *("many steps", "going on", "settled buffers"),
)
MUTANTS: dict[str, Mutant] = {}


def mutant(name, fails, says):
    """Enters the class that it decorates."""

    def enter(kind):
        MUTANTS[name] = Mutant(kind, fails, says)
        return kind

    return enter


class Averaging(Replicated):
    """Whole replicas, made as any strategy is."""

    def __init__(self, comm, find_unused_parameters, options, precision):
        super().__init__(Bucketed(comm, find_unused_parameters, options), precision)


@mutant(
    "forgot to divide",
    (
        "gradients",
        *(name for name in STEPPING if name not in ("clipping", "all at once")),
        *("fp16 overflow", "large tensors"),
    ),
    "are 2 times what it should be",
)
class ForgetsToDivide(Zero2):
    def backward(self, loss):
        super().backward(loss * self.comm.world_size)


@mutant("clips by the local norm", ("clipping", "all at once", "bf16"), "one SGD step: the gradient")
class ClipsByItsOwnNorm(Zero1):
    """By the norm of the shard that it holds."""

    def clip(self, max_norm):
        super().clip(0.0)
        return torch.nn.utils.clip_grad_norm_([part for _, part, *_ in self.pieces], max_norm) if max_norm else None


@mutant("stale shard", (*STEPPING, "bf16"), "SGD: the weight")
class TrainsOnStaleShards(Zero1):
    """Gathers the others' weights for whoever looks, and not for the next step."""

    def stepped(self):
        pass

    def _catch_up(self):
        self._under_way = {unit: gather.start() for unit, gather in self._gathers.items()}

    def whole(self):
        self._catch_up()
        return super().whole()

    def settle(self):
        self._catch_up()
        super().settle()


@mutant("optimizer state not sharded", ("memory", "going on"), "the ranks together hold optimizer 2.00 times")
class KeepsAllState(Averaging):
    """Steps all weights on every rank, and says that it has a share of the optimizer's state."""

    shards = ("optimizer",)


@mutant("gradients not sharded", ("memory",), "the ranks together hold gradients 2.00 times")
class KeepsAllGradients(Averaging):
    """Averages all gradients on every rank, and says that it has a share of them: after the step nobody has any."""

    shards = ("gradients",)


@mutant("optimizer state not counted", ("memory",), "rank 0 counts 0 bytes of optimizer, and")
class CountsNoState(Zero1):
    """Holds its share of the state, and does not count it."""

    def memory(self):
        return super().memory() | {"optimizer": 0}


@mutant("twice-used module counted once", ("module used twice", "all at once"), "the gradient")
class CountsOnce(Zero1):
    """A layer's second call in a forward gives its weights no gradient."""

    def attach(self, model, make_optimizer):
        module = super().attach(model, make_optimizer)
        calls = {}

        def before(layer, _):
            calls[layer] = calls.get(layer, 0) + 1
            if calls[layer] == 2:
                layer.weight.requires_grad_(False)
                layer.bias.requires_grad_(False)

        def after(layer, *_):
            if calls[layer] == 2:
                layer.weight.requires_grad_(True)
                layer.bias.requires_grad_(True)

        def forward(**inputs):
            calls.clear()
            return module(**inputs)

        if model.twice is not None:
            model.twice.register_forward_pre_hook(before)
            model.twice.register_forward_hook(after)
        return forward


@mutant("state kept from an overflow", ("fp16 overflow",), "after step 3")
class KeepsStateOfAnOverflow(Averaging):
    """Takes the step that overflowed with a learning rate of 0: the weights stay, moments and step counts do not."""

    def step(self):
        if not self.is_finite:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            self.optimizer.step()
        return super().step()


@mutant(
    "weight decay of unused weights",
    ("unused parameter", "used on one rank", "all at once"),
    "SGD: the weight unused.weight",
)
class DecaysWhatIsUnused(Averaging):
    """Zeros in place of no gradient: weight decay moves what nobody used."""

    def finish(self):
        super().finish()
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@mutant("small parameters forgotten", ("small parameters", "all at once"), "the gradient one is off")
class ForgetsSmallOnes(Zero1):
    """Parameters of fewer elements than there are ranks are not stepped."""

    def finish(self):
        super().finish()
        for _, part, parameter, *_ in self.pieces:
            if parameter.numel() < self.comm.world_size:
                part.grad = None


@mutant("only the last part counts", ("accumulation", "all at once", "bf16"), "the gradient")
class KeepsTheLastPart(Averaging):
    """Of an accumulated step only the gradient of the last micro-batch."""

    def backward(self, loss):
        for parameter in self._parameters:
            parameter.grad = None
        super().backward(loss)


@mutant("scaled up to the limit", ("no need to clip",), "times what it should be")
class ScalesUp(Averaging):
    """To the limit, whether the norm is above it or not."""

    def clip(self, max_norm):
        norm = super().clip(math.inf if max_norm else 0.0)
        for parameter in self._parameters if max_norm else ():
            if parameter.grad is not None:
                parameter.grad *= max_norm / norm
        return norm


@mutant("buffers not sent", ("buffer", "all at once"), "the gradient")
class KeepsItsOwnBuffers(Averaging):
    def attach(self, model, make_optimizer):
        own = {name: buffer.clone() for name, buffer in model.named_buffers()}
        module = super().attach(model, make_optimizer)
        for name, buffer in model.named_buffers():
            buffer.copy_(own[name])
        return module


@mutant("large tensors averaged in part", ("large tensors",), "the gradient")
class AveragesTheFirstMiB(Averaging):
    """Of a tensor; what comes after it stays a sum."""

    def finish(self):
        super().finish()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.view(-1)[1 << 18 :] *= self.sync.comm.world_size


@mutant("no weights in single precision", ("bf16",), "is rounded to bf16")
class KeepsWeightsInHalf(Averaging):
    def step(self):
        is_good = super().step()
        if self.precision != "fp32":
            for parameter in self._parameters:
                parameter.data = parameter.data.bfloat16().float()
        return is_good


@mutant("optimizer state not sharded, and half of it counted", ("memory", "going on"), "can be seen there")
class SaysItCutsState(KeepsAllState):
    """And counts no more than its share of it."""

    def memory(self):
        held = super().memory()
        return held | {"optimizer": held["optimizer"] // self.sync.comm.world_size}


class WrongBeforeItRefuses(ForgetsToDivide):
    """Its gradients are wrong; by AdamW it does not train at all."""

    def attach(self, model, make_optimizer):
        module = super().attach(model, make_optimizer)
        if isinstance(self.optimizer, torch.optim.AdamW):
            raise UserError("this engine knows no AdamW: choose --optimizer sgd.")
        return module


class RefusesLate(Averaging):
    """Only when the second step has been made, on every rank."""

    def attach(self, model, make_optimizer):
        self._steps = 0
        return super().attach(model, make_optimizer)

    def step(self):
        self._steps += 1
        if self._steps == 2:
            raise UserError("this engine is tired: try another one.")
        return super().step()


class RefusesClipping(Averaging):
    def clip(self, max_norm):
        if max_norm:
            raise UserError("this engine cannot clip: leave --max_grad_norm out.")


class BreaksOnOneRank(Averaging):
    def clip(self, max_norm):
        if max_norm and self.sync.comm.rank == 1:
            raise RuntimeError("a clip too far")
        return super().clip(max_norm)


class WaitsForEver(Averaging):
    """On every rank, and not for a collective."""

    def clip(self, max_norm):
        while max_norm:
            time.sleep(1)


def replicated(name, comm, find_unused_parameters, options, precision):
    """Whole replicas whose gradients are averaged by the drawn mutant of that name."""
    return Replicated(DRAWN[name].make()(comm, find_unused_parameters, options), precision)


# Mistakes of syncs that few steps, or single precision, do not show.
for name, fails, says in (
    ("settles nothing", "settled buffers", "after settle the buffer seen is not rank 0's on rank"),
    ("infinite becomes 0", "fp16 overflow", "the steps that count are"),
    ("every 12th step", "many steps", "many SGD steps: the weight"),
    ("last rank left out under a scale", "fp16 overflow", "the steps that count are"),
    ("doubled after loading", "going on", "SGD: the weight"),
    ("drifts", "many steps", "many SGD steps: the weight"),
    ("float64 through float32", "many steps", "many SGD steps: the weight"),
):
    mutant(name, (fails,), says)(functools.partial(replicated, name))
