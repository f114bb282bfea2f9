"""torch's ZeroRedundancyOptimizer on torch's DDP: whole gradients, and optimizer state sharded over the ranks."""

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
    """Sharded optimizer state, by torch (after Rajbhandari et al., "ZeRO", SC 2020, section 5.1).

    1. DDP averages the gradients while backward runs. Every rank has all of them, and clips by their norm.
    2. Whole parameters are assigned to the ranks, the largest first, each to the rank with the least so far. Each rank
       steps its own, and holds the optimizer state of these only.
    3. Each rank broadcasts the parameters that it stepped. `parameters_as_bucket_view` makes a rank's parameters
       contiguous, so that one call sends them all; without it, each parameter is sent by itself.

    Cost for S bytes of gradients and weights on n ranks: as for `ddp`, 2(n-1)/n S, and n broadcasts of S in total.
    gloo's broadcasts are trees: a rank receives S less its own share. Ranks near a root forward what they receive, up
    to ceil(log2 n) S/n for each root. The textbook's (`zero1`) is a reduce-scatter and an all-gather, together 2(n-1)/n
    S. Memory: S of weights, S of gradients (and S of DDP's buckets, except with --bucket_view), and with AdamW about 2
    S/n of state, as even as whole parameters allow. Choose it if only the optimizer state does not fit and you may use
    nothing but torch.

    Known wrong: a parameter larger than S/n makes shares uneven, and all ranks wait for the rank that has it.
    """

    optimizer: Any  # ZeroRedundancyOptimizer; its `optim` is this rank's share
    sync_kind = DDP
    options_kind = DDP.options_kind
    uses = ("bucket_mb", "bucket_view")
    shards = ("optimizer",)

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        module = super().attach(model, lambda named: _in_shards(make_optimizer(named)))
        self.layout = StateLayout(model, make_optimizer)
        return module

    def memory(self) -> dict[str, int]:
        # ZeroRedundancyOptimizer itself has no state: its inner optimizer has that of this rank's parameters.
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
        for parameter in self._parameters:  # out of the buckets, each of which holds all parameters of one rank
            parameter.data = parameter.data.clone()
        super().detach()


def dealt_out(groups: Sequence[Sequence[nn.Parameter]], ranks: int) -> list[list[nn.Parameter]]:
    """The parameters that each rank steps: group by group, each parameter goes to the rank with the least so far."""
    hands: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    for group in groups:
        for parameter in sorted(group, key=lambda p: p.numel(), reverse=True):
            min(hands, key=lambda hand: sum(p.numel() for p in hand)).append(parameter)
    return hands


def _in_shards(whole: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    """An optimizer of the same kind, groups and settings that is sharded over the ranks."""
    kind = type(whole)
    settings = {name: value for name, value in whole.defaults.items() if name in inspect.signature(kind).parameters}
    groups = [group for group in whole.param_groups if group["params"]]
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, parameters_as_bucket_view=True, **settings)
