"""The interface of a gradient sync: what happens between `loss.backward()` and `optimizer.step()`."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT, BUFFERS, BY_LEDGER, STATE
from cos598d.sync.alike import check_models

if TYPE_CHECKING:
    from cos598d.comm.ledger import Ledger
    from cos598d.sync.options import Options

Named = tuple[str, nn.Parameter]


class GradientSync:
    """One way for n replicas to agree on their gradients. `Parallel` (parallel.py) calls it like this:

        call = sync.attach(model)      # rank 0's state on every rank; what to call in the model's place
        loss.backward()                # for each gradient that backward has computed: sync.ready(parameter)
                                       # at backward's end: sync.finish(); now .grad is the average over the ranks
        optimizer.step()               # then: sync.after_step()
        sync.settle()                  # before the model is evaluated or saved: weights and buffers are equal
        sync.detach()

    The simplest kind acts after backward and implements only `average`, with plain calls of torch.distributed. The
    ledger sees them by itself.

    shards: whether each rank's optimizer steps only a part of the weights. every_backward: whether backwards inside
    `no_sync` are reduced too. replicas_equal: whether all ranks hold the same weights between two steps.
    takes: the names of its options, fields of `options.Options`. keeps_optimizer_state: whether a checkpoint has what
    the optimizer remembers. bytes_from: whether the ledger has its bytes, or only the kernel's counters.

    A sync of your own must not use the names of this class for anything else: also not count, agree, gradients,
    exchange, broadcast, peer, rank, ranks, group, ledger, model, parameters, options and optimizer.
    """

    shards = every_backward = False
    replicas_equal = keeps_optimizer_state = True
    bytes_from = BY_LEDGER
    takes: tuple[str, ...] = ("find_unused_parameters", "broadcast_buffers")
    options: Any
    optimizer: torch.optim.Optimizer | None = None  # set by `Parallel`
    ends_step = True  # set by `Parallel`: whether the last forward of training was outside of no_sync
    buffers_are_due = True  # an average was made since rank 0's buffers were sent

    def __init__(self, ledger: "Ledger", options: "Options | None" = None, group: dist.ProcessGroup | None = None):
        """`group`: the ranks that train the model; None for all of them."""
        self.ledger, self.options, self.group = ledger, options, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.parameters: list[Named] = []

    def __deepcopy__(self, memo: dict) -> "GradientSync":
        """A copy of a model has copies of its hooks, and they belong to this sync as before."""
        return self

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        """Raise UsageError, before the ranks meet, if it cannot train on so many ranks, or in this precision."""

    # What `Parallel` calls

    def attach(self, model: nn.Module) -> Callable:
        """Make every rank's model equal rank 0's. Return what to call in its place.

        Trainable parameters, frozen ones and buffers are sent; tied weights once. Raises UserError, the same on every
        rank, if the ranks' models differ.
        """
        self.model = model
        check_models(model, self.exchange)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.broadcast([tensor], name, STATE)
        # A tensor without elements is on all ranks what it is.
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        return model

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that the script steps: this one, or that of a library, made from it."""
        return optimizer

    def begin_forward(self) -> None:
        """A forward is about to begin, of training or of evaluation."""
        if self.buffers_are_due and self.options.broadcast_buffers:
            GradientSync.settle(self)  # only the buffers, whatever a sync of weights does in its own settle

    def ready(self, parameter: nn.Parameter) -> None:
        """Backward has computed this parameter's .grad. It may start to send it."""

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
        """Make the ranks' models equal: give every rank rank 0's buffers, and shared weights if they differ."""
        self.buffers_are_due = False
        self.broadcast(self.model.buffers(), "buffers", BUFFERS)

    def own_state(self) -> dict[str, torch.Tensor]:
        """What this rank keeps from one step to the next, by name, for a checkpoint. Every rank calls it, settled."""
        return {}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what the same rank's `own_state` gave. Called after `attach`, before the first step."""

    def detach(self) -> None:
        """Remove hooks and free buffers. The model does not change."""
        self.parameters = []

    # What syncs call

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The gradients to average, the same on every rank: dense real numbers, in the order of the parameter's memory.

        A rank without one that others have gets zeros.
        """
        seen: set[int] = set()
        found = []
        used = self.agree([p.grad is not None for _, p in self.parameters])
        for (name, p), is_used in zip(self.parameters, used, strict=True):
            if is_used:
                own = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                if own.data_ptr() in seen or own.stride() != p.stride() or own.is_conj():
                    own = torch.empty_like(p).copy_(own)  # another's memory, or another order of elements
                p.grad = own
                seen.add(own.data_ptr())
                found.append((name, torch.view_as_real(own) if p.is_complex() else own))
        return found

    def agree(self, has: list[bool]) -> list[bool]:
        """Whether any rank has what this one `has`, for each parameter: a small all-reduce.

        With find_unused_parameters off, nothing is sent: raises UserError if this rank lacks one. zero2,
        zero3, sparse_zero1 and shared_weights send it always.
        """
        if not self.options.find_unused_parameters:
            if not all(has):
                raise UserError(
                    f"{self.parameters[has.index(False)][0]} got no gradient in this step, although "
                    "find_unused_parameters is False. Give find_unused_parameters=True for a model that leaves "
                    "parameters unused."
                )
            return has
        return [users > 0 for users in self.count(has)]

    def count(self, numbers: Sequence[int]) -> list[int]:
        """The sums of these small numbers over the ranks, of which every rank gives as many: a small all-reduce."""
        sums = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        with self.ledger.naming("ranks that used each parameter", AGREEMENT):
            dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), in order of rank. For small values before training. Nothing is unpickled.

        1. The ranks agree on the length of the longest text.
        2. Each gathers all texts, which end in spaces up to that length.
        """
        text = json.dumps(value).encode()
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        with self.ledger.naming("what the ranks tell each other", AGREEMENT):
            longest = torch.tensor([len(text)], device=device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
            own = torch.tensor(list(text.ljust(int(longest))), dtype=torch.uint8, device=device)
            texts = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(texts, own, group=self.group)
        return [json.loads(bytes(each.tolist())) for each in texts]

    def broadcast(self, tensors: Iterable[torch.Tensor], name: str, purpose: str) -> None:
        """Put rank 0's tensors into each rank's, packed as bytes: in one call, whatever their dtypes and strides."""
        # .data: the graph of an earlier forward may have saved a buffer, as with torch's DDP
        data = [tensor.data for tensor in tensors if tensor.numel()]
        if data and self.ranks > 1:
            parts = [each.contiguous().view(-1).view(torch.uint8) for each in data]
            together = torch.cat(parts)
            with self.ledger.naming(name, purpose):
                dist.broadcast(together, self.peer(0), group=self.group)
            for each, part in zip(data, together.split([len(part) for part in parts]), strict=True):
                each.copy_(part.clone().view(each.dtype).view(each.shape))

    def peer(self, rank: int) -> int:
        """The number of this group's rank among all processes, as torch needs it."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0][1].device
