"""`ShardedOptimizer`: the optimizer's state cut over the ranks, for whole gradients, equal on all of them."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.comm.exchange import WeightGather
from cos598d.comm.group import GroupCommunicator
from cos598d.comm.ledger import dtype_name
from cos598d.doors.optimizer_shards import OptimizerOfShards, check_optimizers, cut_optimizer, options_of, result_of
from cos598d.doors.parallel import device_of
from cos598d.errors import UsageError, UserError
from cos598d.strategies.parts.units import Unit
from cos598d.strategies.state import FullTensor, OptimizerState, ShardSlice, Stepped
from cos598d.sync.buckets import Named, plan_buckets
from cos598d.sync.options import DEFAULTS


class ShardedOptimizer(OptimizerOfShards):
    """An optimizer of which each rank keeps the state of an n-th, in the form of torch's ZeroRedundancyOptimizer.

    It is for gradients that are whole and equal on every rank when `step` is called: after DDP, `data_parallel`, or an
    all-reduce of the script's own. What is None is None on every rank.
    1. The parameters lie side by side in buckets. Each bucket is cut into n parts, and part r is rank r's.
    2. In `step` rank r steps its parts. Every rank then sends them to the others: (n-1)/n of the weights that had a
       gradient. When it returns the weights are equal on every rank, and gradients are as they were.
    """

    _comm: GroupCommunicator

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 300.0,
        **options: Any,
    ):
        """Every rank makes it of the same parameters, or groups of them; `options` are the optimizer's.

        Raises UsageError, the same on every rank, for an optimizer that does not treat every element by itself, and
        UserError where the ranks' parameters or options differ.
        """
        self._own: torch.optim.Optimizer | None = None
        whole = optimizer_class(params, **options)
        self._kind, self._kept = optimizer_class.__name__, None
        super().__init__(whole.param_groups, whole.defaults)
        self._comm = GroupCommunicator(process_group, device_of(self._all(), "ShardedOptimizer"), timeout_seconds)
        self._parameters = {}
        self._gathers: list[tuple[Unit, WeightGather]] = []
        self._places: list[tuple[nn.Parameter, torch.Tensor]] = []  # where each parameter lies in its bucket
        self._pieces: list[tuple[nn.Parameter, Stepped]] = []  # what this rank steps, with its whole parameter
        named = self._name(self._all())
        check_optimizers(self._comm, whole, named)
        self._own = cut_optimizer(whole, named)(self._cut(named))

    @property
    def communication(self) -> dict[str, int]:
        """The bytes that this rank has sent so far, by bucket."""
        return self._comm.ledger.bytes_sent()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """As torch's; `closure` is called once, and `keywords` go to the optimizer's own step. Every rank calls it."""
        assert self._own is not None
        loss = result_of(closure)
        self._kept = None
        for group, own in zip(self.param_groups, self._own.param_groups, strict=True):
            own.update(options_of(group))
        self._lay_what_was_moved()
        for p, piece in self._pieces:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise UserError(
                    f"the gradient of {piece.name} is sparse, but ShardedOptimizer steps only dense ones. Make the "
                    "embedding with sparse=False."
                )
            piece.parameter.grad = None if p.grad is None else piece.part_of(p.grad)
        self._own.step(**keywords)
        self._own.zero_grad()
        for group, own in zip(self.param_groups, self._own.param_groups, strict=True):
            group.update(options_of(own))
        moved = [gather for unit, gather in self._gathers if any(p.grad is not None for _, p in unit.parameters)]
        for gather in moved:
            gather.start()
        for gather in moved:
            gather.wait()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Every rank calls it with the same."""
        super().add_param_group(param_group)
        if self._own is not None:
            group = self.param_groups[-1]
            parts = self._cut(self._name(group["params"]))
            self._own.add_param_group({"params": [part for _, part in parts], **options_of(group)})

    def _all(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _name(self, parameters: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Names for parameters that are new: place, shape and dtype, by which ranks that differ find it out."""
        places = itertools.count(len(self._parameters))
        return {f"parameter {next(places)} {tuple(p.shape)} {dtype_name(p.dtype)}": p for p in parameters}

    def _cut(self, named: Mapping[str, nn.Parameter]) -> list[Named]:
        """Lay parameters in buckets, and cut these; what this rank steps of each parameter."""
        comm, parts = self._comm, []
        buckets = [
            bucket
            for trains in (True, False)  # what is frozen need not travel with what is not
            for bucket in plan_buckets(
                [(name, p) for name, p in named.items() if p.requires_grad == trains],
                DEFAULTS.bucket_mb,
                DEFAULTS.first_bucket_mb,
            )
        ]
        first_tag = comm.take_tags(2 * len(buckets))
        for number, bucket in enumerate(buckets):
            unit = Unit(f"bucket {len(self._gathers)}", bucket, comm.world_size)
            unit.number, unit.first_tag = number, first_tag
            flat = unit.empty(unit.elements)
            self._places += [(p, view) for view, (_, p) in zip(unit.views(flat), bucket, strict=True)]
            self._gathers.append((unit, WeightGather(comm, unit.name, flat, unit.lengths, unit.weights_tag)))
            own = unit.parts(flat)[comm.rank]
            for piece in unit.pieces(comm.rank):
                part = nn.Parameter(own[piece.begin : piece.end])
                held = Stepped(piece.name, tuple(piece.parameter.shape), piece.offset, part)
                self._pieces.append((piece.parameter, held))
                parts.append((piece.name, part))
        self._parameters |= named
        self._lay_what_was_moved()
        return parts

    def _lay_what_was_moved(self) -> None:
        """Lay parameters in their places where they are not there: new ones, and those whose memory was replaced."""
        for p, place in self._places:
            if p.data_ptr() != place.data_ptr():
                if p.dtype != place.dtype or p.shape != place.shape or p.device != place.device:
                    raise UsageError(
                        f"a parameter of the shape {tuple(place.shape)} has another shape, dtype or device than when "
                        "ShardedOptimizer was made. Make it after such a change."
                    )
                p.data = place.copy_(p.data)

    def _memory(self) -> OptimizerState:
        assert self._own is not None
        return OptimizerState(self._own, [piece for _, piece in self._pieces])

    def _own_state(self) -> Iterable[ShardSlice]:
        return self._memory().pieces()

    def _load_own(self, wholes: Iterable[FullTensor]) -> None:
        memory = self._memory()
        memory.forget()
        for whole in wholes:
            memory.put(whole)
