"""Gradient syncs, each with one mistake that is made in practice: tests of the conformance suite."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cos598d import train
from cos598d.data import sampler
from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.base import GradientSync
from cos598d.sync.gather_scatter import GatherScatter


class SumNotMean(AllReduce):
    def average(self, name, gradient):
        self.comm.all_reduce(gradient, name)


class ClipBeforeSync(AllReduce):
    def finish(self):
        torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], 0.3)
        super().finish()


class GatherWithoutScatter(GatherScatter):
    def average(self, name, gradient):
        copies = self.comm.gather(gradient, name)
        if copies is not None:
            gradient.copy_(torch.stack(copies).mean(dim=0))


class WeightsInsteadOfGradients(AllReduce):
    def average(self, name, gradient):
        weight = dict(self.parameters)[name].data
        super().average(name, weight)


class WeightsScaled(AllReduce):
    """Averages gradients, but also touches the weights, as a hook does that takes the parameter for its gradient."""

    def average(self, name, gradient):
        super().average(name, gradient)
        dict(self.parameters)[name].data /= self.comm.world_size


class NoInitialBroadcast(AllReduce):
    def attach(self, model):
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return model


class NoBroadcastOfFrozenWeights(AllReduce):
    """Sends what it trains, and the buffers."""

    def attach(self, model):
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, tensor in (*self.parameters, *model.named_buffers()):
            self.comm.broadcast(tensor.data, name, purpose="state")
        return model


class ZerosForUnused(AllReduce):
    """Fills zeros where no rank had a gradient, so that the optimizer moves weights nobody used."""

    def gradients(self):
        for _, p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [(name, p.grad) for name, p in self.parameters]


class SyncsUnderNoSync(AllReduce):
    """Starts its calls from hooks without asking whether this is the last micro-batch."""

    def attach(self, model):
        module = super().attach(model)
        for name, p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda p, name=name: AllReduce.average(self, name, p.grad))
        return module

    def finish(self):
        pass


class LeavesHooks(AllReduce):
    def attach(self, model):
        module = super().attach(model)
        for name, p in model.hidden.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._travel(name, p.grad.clone()))
        return module

    def _travel(self, name, gradient):
        self.comm.all_reduce(gradient, name)


@dataclass(frozen=True)
class Mutant:
    """`make` gives the sync's class, after whatever else the mistake needs; `claim` must fail, and say `says`."""

    make: Callable[[], type[GradientSync]]
    claim: str
    says: str


def _same_data_on_all_ranks() -> type[GradientSync]:
    sampler.share_of = lambda batch, rank, world_size: batch[: max(1, len(batch) // world_size)]
    return AllReduce


def _clip_in_the_loop_before_sync() -> type[GradientSync]:
    clip = torch.nn.utils.clip_grad_norm_

    class Early(AllReduce):
        def attach(self, model):
            train.torch.nn.utils.clip_grad_norm_ = lambda *_: None  # for this training, not for the reference
            return super().attach(model)

        def finish(self):
            clip([p for _, p in self.parameters], 0.3)
            super().finish()

        def detach(self):
            super().detach()
            train.torch.nn.utils.clip_grad_norm_ = clip

    return Early


MUTANTS = {
    "sum not mean": Mutant(lambda: SumNotMean, "averages_gradients", "off the mean"),
    "clip before sync": Mutant(lambda: ClipBeforeSync, "averages_gradients", "off the mean"),
    "clip before sync, in the loop": Mutant(_clip_in_the_loop_before_sync, "trains_like_one_process", "differ"),
    "gather without scatter": Mutant(lambda: GatherWithoutScatter, "averages_gradients", "off the mean"),
    "same data on all ranks": Mutant(_same_data_on_all_ranks, "trains_like_one_process", "losses differ"),
    "weights instead of gradients": Mutant(lambda: WeightsInsteadOfGradients, "averages_gradients", "off the mean"),
    "weights touched too": Mutant(lambda: WeightsScaled, "averages_gradients", "changed the weight"),
    "no initial broadcast": Mutant(lambda: NoInitialBroadcast, "starts_from_rank_0", "differs from rank 0's"),
    "no broadcast of frozen weights": Mutant(lambda: NoBroadcastOfFrozenWeights, "starts_from_rank_0", "frozen.weight"),
    "zeros for unused parameters": Mutant(
        lambda: ZerosForUnused, "handles_unused_parameters", "should have no gradient"
    ),
    "calls under no_sync": Mutant(lambda: SyncsUnderNoSync, "accumulates", "under no_sync"),
    "hooks left behind": Mutant(lambda: LeavesHooks, "lets_go", "after detach"),
}
