"""torch's ZeroRedundancyOptimizer on torch's DDP: gradients whole, the optimizer's state cut over the ranks."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from cos598d.comm.gloo import broadcast_bytes
from cos598d.comm.ledger import size_in_bytes
from cos598d.comm.watched import watched
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec, replicated_memory
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.optimizers import decayed_and_plain
from cos598d.strategies.replicated import Replicated
from cos598d.strategies.state import OptimizerState, StateLayout, stepped_whole
from cos598d.sync.ddp import DDP


class TorchZero1(Replicated):
    """The optimizer's state in shards, as torch has it (after Rajbhandari et al., "ZeRO", SC 2020, section 5.1).

    1. DDP averages the gradients while backward runs: every rank has all of them, and clips by their norm.
    2. Whole parameters are dealt out to the ranks, the largest first, always to the rank that has least so far. Each
       rank steps its own, and has the optimizer's state for these alone.
    3. Each rank broadcasts what it has stepped. `parameters_as_bucket_view` lays a rank's parameters side by side, so
       that they are sent in one call a rank; without it every parameter is sent by itself.

    Cost for S bytes of gradients and weights on n ranks: what `ddp` costs, 2(n-1)/n S, and n broadcasts of S in all.
    gloo's are trees: a rank receives S less its own share, and ranks near a root send on what they receive, up to
    ceil(log2 n) S/n for each root. The textbook's (`zero1`): a reduce-scatter and an all-gather, together 2(n-1)/n S.
    Memory: S of weights, S of gradients (and S of DDP's buckets, except for --bucket_view), with AdamW about 2 S/n of
    state: as even as whole parameters can be dealt out.
    Choose it where the optimizer's state is what does not fit and torch is all there may be.

    Known wrong: a parameter larger than S/n makes shares uneven, and the rank that has it is waited for.
    """

    optimizer: Any  # ZeroRedundancyOptimizer, whose `optim` is this rank's share of it
    sync_kind = DDP
    uses = ("bucket_mb", "bucket_view")
    shards = ("optimizer",)

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        module = super().attach(model, lambda named: _in_shards(make_optimizer(named)))
        self.layout = StateLayout(model, make_optimizer)
        return module

    def memory(self) -> dict[str, int]:
        # ZeroRedundancyOptimizer itself remembers nothing: it has an optimizer of what this rank steps.
        return super().memory() | count_memory(optimizer=state_tensors(self.optimizer.optim))

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        mine = dealt_out(decayed_and_plain(job.trainable), job.ranks)[job.rank]
        state = job.state(sum(map(size_in_bytes, mine)), len(mine))
        return replicated_memory(job, self.sync.buffers(job.tensors, self.options), state)

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        sent = super().expected_sent(job)
        if sent.unsaid or job.ranks == 1:
            return sent
        hands = dealt_out(decayed_and_plain(job.trainable), job.ranks)
        handed_round = sum(
            broadcast_bytes(sum(map(size_in_bytes, hand)), job.ranks, (job.rank - root) % job.ranks)[0]
            for root, hand in enumerate(hands)
        )
        return replace(sent, synchronizing=sent.synchronizing + handed_round, calls=sent.calls + job.ranks)

    def step(self) -> bool:
        with watched(self.comm):
            return super().step()

    def inner_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optim

    def optimizer_state(self) -> OptimizerState:
        stepped = {p for group in self.optimizer.optim.param_groups for p in group["params"]}
        mine = ((name, p) for name, p in self.model.named_parameters() if p in stepped)
        return OptimizerState(self.inner_optimizer(), stepped_whole(mine))

    def detach(self) -> None:
        for parameter in self._parameters:  # out of the buckets, which hold all of a rank's
            parameter.data = parameter.data.clone()
        super().detach()


def dealt_out(groups: Sequence[Sequence[nn.Parameter]], ranks: int) -> list[list[nn.Parameter]]:
    """What each rank steps: of one group after another, each parameter to the rank that has least so far."""
    hands: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    for group in groups:
        for parameter in sorted(group, key=lambda p: p.numel(), reverse=True):
            min(hands, key=lambda hand: sum(p.numel() for p in hand)).append(parameter)
    return hands


def _in_shards(whole: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    """An optimizer of the same kind, groups and settings, of which each rank has a share."""
    kind = type(whole)
    settings = {name: value for name, value in whole.defaults.items() if name in inspect.signature(kind).parameters}
    groups = [group for group in whole.param_groups if group["params"]]
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, parameters_as_bucket_view=True, **settings)
