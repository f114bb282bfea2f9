"""`ShardedOptimizer`: the optimizer's state cut over the ranks, for gradients that are whole on every rank."""

from collections.abc import Iterable
from typing import Any

import torch

from cos598d.comm.ledger import Ledger
from cos598d.state import by_parameter
from cos598d.sync.base import GradientSync
from cos598d.sync.buckets import plan_buckets
from cos598d.zero.collectives import start_all_gather
from cos598d.zero.shards import Shards
from cos598d.zero.unit import Unit

BUCKET_MB = 25.0


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which each rank keeps the state of an n-th, in the form of torch's ZeroRedundancyOptimizer.

    It is for gradients that are whole and equal on every rank when `step` is called: after DDP, `data_parallel`, or an
    all-reduce of the script's own. In `step` rank r steps part r of the parameters, and sends it to all others.
    """

    def __init__(self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], **options: Any):
        """`group` and the optimizer's `options`. Raises UserError for an optimizer that is not elementwise."""
        self._sync = GradientSync(Ledger(), group=options.pop("group", None))
        self._own = optimizer_class(params, **options)
        super().__init__([dict(group) for group in self._own.param_groups], self._own.defaults)
        every = enumerate(p for group in self.param_groups for p in group["params"])
        buckets = plan_buckets([(str(place), p) for place, p in every if p.numel()], BUCKET_MB, BUCKET_MB)
        units = [Unit(f"bucket {k}", bucket, self._sync.rank, self._sync.ranks) for k, bucket in enumerate(buckets)]
        self._shards = Shards(units, self._own)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """As torch's, without a closure. Every rank calls it."""
        for group, own in zip(self.param_groups, self._own.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        for unit in self._shards.units:
            unit.check()
        for p, piece in self._shards.piece_of.items():
            piece.part.grad = None if p.grad is None else piece.of(p.grad.to_dense())
        self._own.step()
        gathers = [start_all_gather(self._sync, unit, unit.weights, unit.name) for unit in self._shards.units]
        for arrive in gathers:
            arrive()

    def state_dict(self) -> dict[str, Any]:
        """What one optimizer of all parameters would give, whole, on every rank. Every rank calls it."""
        found = by_parameter(dict(self._shards.whole_state(self._sync)))
        return {**super().state_dict(), "state": {int(place): found[place] for place in sorted(found, key=int)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, of any number of ranks, or of one optimizer. Every rank calls it."""
        super().load_state_dict({**state_dict, "state": {}})
        kinds = [(f"{kind}/{place}", one) for place, of in state_dict["state"].items() for kind, one in of.items()]
        self._shards.load({key: torch.as_tensor(one) for key, one in kinds if one is not None})
