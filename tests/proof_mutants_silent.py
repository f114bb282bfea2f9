"""Engines with one mistake each that few steps, or single precision, do not show: more tests of the proof."""

import torch
from proof_mutants import Averaging, Mutant

from cos598d.strategies.replicated import Replicated
from cos598d.sync.all_reduce import AllReduce


class SettlesNothing(Averaging):
    def settle(self):
        pass


class MakesInfinityFinite(Averaging):
    def clip(self, max_norm):
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0, 0, 0)
        return super().clip(max_norm)


class LeavesOutEvery12th(Replicated):
    """Averages no gradient of every twelfth step. Its sync starts in `finish`; until then gradients are the rank's."""

    steps = 0

    def __init__(self, comm, find_unused_parameters, options, precision):
        super().__init__(AllReduce(comm, find_unused_parameters, options), precision)

    def finish(self):
        self.steps += 1
        own = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        super().finish()
        for parameter, gradient in zip(self._parameters, own, strict=True):
            if self.steps % 12 == 0:
                parameter.grad = gradient


class LeavesOutTheLastRankUnderAScale(Averaging):
    def backward(self, loss):
        is_left_out = self.loss_scale != 1 and self.comm.rank == self.comm.world_size - 1
        super().backward(loss * (0.0 if is_left_out else 1.0))


class DoublesAfterLoading(Averaging):
    factor = 1.0

    def load_own_state(self, facts, tensors):
        super().load_own_state(facts, tensors)
        self.factor = 2.0

    def backward(self, loss):
        super().backward(loss * self.factor)


class Drifts(Averaging):
    steps = 0

    def finish(self):
        super().finish()
        self.steps += 1
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad *= 1 + 1e-7 * self.steps


class SendsSingle(Averaging):
    """Whatever the dtype."""

    def finish(self):
        super().finish()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.to(torch.float32))


SILENT = {
    "settles nothing": Mutant(
        SettlesNothing, ("settled buffers",), "after settle the buffer seen is not rank 0's on rank"
    ),
    "infinity becomes 0": Mutant(MakesInfinityFinite, ("fp16 overflow",), "the steps that count are"),
    "every 12th step": Mutant(LeavesOutEvery12th, ("many steps",), "many SGD steps: the weight"),
    "last rank left out under a scale": Mutant(
        LeavesOutTheLastRankUnderAScale, ("fp16 overflow",), "the steps that count are"
    ),
    "doubled after loading": Mutant(DoublesAfterLoading, ("going on",), "SGD: the weight"),
    "drifts": Mutant(Drifts, ("many steps",), "many SGD steps: the weight"),
    "float64 through float32": Mutant(SendsSingle, ("many steps",), "many SGD steps: the weight"),
}
