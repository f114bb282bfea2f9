"""The interface of a gradient sync: what happens between `loss.backward()` and `optimizer.step()`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cos598d.heart.comm.ledger import Ledger
from cos598d.records.conventions import AGREEMENT, BUFFERS, STATE

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Options:
    """What a sync may be given: the size of buckets and of the first one in MiB, and whether a step may leave a
    parameter without a gradient on some rank; a codec for buckets; the steps between two averages of weights."""

    bucket_mb: float = 25.0
    first_bucket_mb: float = 1.0
    find_unused_parameters: bool = True
    compress: str | None = None
    sync_every: int = 1


class GradientSync:
    """One way for n replicas to agree on their gradients. `Parallel` (parallel.py) calls it like this:

        call = sync.attach(model)      # rank 0's state on every rank; what to call in the model's place
        loss.backward()                # for each gradient that backward has computed: sync.ready(parameter)
                                       # at backward's end: sync.finish(); now .grad is the average over the ranks
        sync.settle()                  # before the model is evaluated or saved: weights and buffers are equal
        sync.detach()

    The simplest kind acts after backward and implements only `average`, with plain calls of torch.distributed. The
    ledger sees them by itself.

    shards: whether each rank's optimizer steps only a part of the weights. every_backward: whether backwards inside
    `no_sync` are reduced too. replicas_equal: whether all ranks hold the same weights between two steps.
    """

    shards = every_backward = False
    replicas_equal = True

    def __init__(self, ledger: Ledger, options: Options = Options(), group: dist.ProcessGroup | None = None):
        self.ledger, self.options, self.group = ledger, options, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.parameters: list[Named] = []

    def attach(self, model: nn.Module) -> Callable:
        """Make every rank's model equal rank 0's. Return what to call in its place."""
        self.model = model
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                self.broadcast(tensor.data, name, STATE)
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return model

    def ready(self, parameter: nn.Parameter) -> None:
        """Backward has computed this gradient. It may start to send it."""

    def finish(self) -> None:
        """Block until every .grad is the average over the ranks. A parameter that no rank used keeps None."""
        for name, gradient in self.gradients():
            with self.ledger.naming(name):
                self.average(name, gradient)

    def average(self, name: str, gradient: torch.Tensor) -> None:
        """Replace `gradient` by its average over the ranks, in place. Called in the same order on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no average()")

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for a library that has to be told that a backward only accumulates."""
        return nullcontext()

    def settle(self) -> None:
        """Give every rank rank 0's buffers."""
        for name, buffer in self.model.named_buffers():
            self.broadcast(buffer.data, name, BUFFERS)

    def detach(self) -> None:
        """Free buffers. The model does not change."""
        self.parameters = []

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients to average, the same on every rank. A rank without one that others have gets zeros."""
        for (name, p), used in zip(self.parameters, self.used(), strict=True):
            if used:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                yield name, p.grad

    def used(self) -> list[bool]:
        """Whether any rank has a gradient, for each parameter: an all-reduce of 4 bytes per parameter, if it may not.

        Raises ValueError without find_unused_parameters, if this rank has none."""
        has = [p.grad is not None for _, p in self.parameters]
        return self.agree(has)

    def agree(self, has: list[bool]) -> list[bool]:
        if not self.options.find_unused_parameters:
            if not all(has):
                name = self.parameters[has.index(False)][0]
                raise ValueError(f"{name} got no gradient in this step. Give find_unused_parameters=True.")
            return has
        users = torch.tensor(has, dtype=torch.int32, device=self.parameters[0][1].device)
        with self.ledger.naming("ranks that used each parameter", AGREEMENT):
            dist.all_reduce(users, group=self.group)
        return [count > 0 for count in users.tolist()]

    def peer(self, rank: int) -> int:
        """The number of this group's rank among all processes, as torch needs it."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def broadcast(self, tensor: torch.Tensor, name: str, purpose: str) -> None:
        """Put rank 0's tensor into each rank's."""
        with self.ledger.naming(name, purpose):
            dist.broadcast(tensor, self.peer(0), group=self.group)
