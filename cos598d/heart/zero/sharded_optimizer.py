"""`ShardedOptimizer`: the optimizer's state cut over the ranks, for gradients that are whole on every rank."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from cos598d.heart.state import by_parameter
from cos598d.heart.sync.base import GradientSync
from cos598d.heart.sync.buckets import plan_buckets
from cos598d.heart.zero.collectives import start_all_gather
from cos598d.heart.zero.shards import Shards
from cos598d.heart.zero.unit import Unit


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which each rank keeps the state of an n-th, in the form of torch's ZeroRedundancyOptimizer.

    It is for gradients that are whole and equal on every rank when `step` is called: after DDP, `data_parallel`, or an
    all-reduce of the script's own. In `step` rank r steps part r of the parameters, and sends it to all others.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ):
        """`options` are the optimizer's. Raises UserError for one that does not treat every element by itself."""
        self._own = optimizer_class(params, **options)
        super().__init__([dict(one) for one in self._own.param_groups], self._own.defaults)
        self._sync = GradientSync(group=group)
        named = [(f"{k}", p) for k, p in enumerate(p for one in self.param_groups for p in one["params"])]
        buckets = plan_buckets([(name, p) for name, p in named if p.numel()], 25.0, 25.0)
        rank, ranks = self._sync.rank, self._sync.ranks
        self._units = [Unit(k, f"bucket {k}", bucket, rank, ranks) for k, bucket in enumerate(buckets)]
        for unit in self._units:
            unit.hold(unit.empty())
        self._shards = Shards(self._units, self._own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's. Every rank calls it."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for whole, own in zip(self.param_groups, self._own.param_groups, strict=True):
            own.update({key: value for key, value in whole.items() if key != "params"})
        for unit in self._units:
            unit.take_moved()
        for unit, piece, part in self._shards.pieces:
            gradient = piece.parameter.grad
            part.grad = None if gradient is None else unit.own(piece, gradient.to_dense())
        self._own.step()
        for arrive in [start_all_gather(self._sync, unit, unit.weights, unit.part, unit.name) for unit in self._units]:
            arrive()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What one optimizer of all parameters would give, whole, on every rank. Every rank calls it."""
        whole = dict(self._shards.whole_state(self._sync))
        state = {int(name): kinds for name, kinds in by_parameter(whole).items()}
        return {**super().state_dict(), "state": {k: state[k] for k in sorted(state)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, on any number of ranks, or of one optimizer. Every rank calls it with the same."""
        super().load_state_dict({**state_dict, "state": {}})
        kinds = ((f"{kind}/{k}", value) for k, state in state_dict["state"].items() for kind, value in state.items())
        self._shards.load({key: torch.as_tensor(value) for key, value in kinds if value is not None})
